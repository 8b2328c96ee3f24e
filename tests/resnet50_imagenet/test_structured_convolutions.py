"""main.py --conv-cfg: structured convolutions from nothing, and those nearest to dense weights."""

from __future__ import annotations

import re

import pytest

from tests.resnet50_imagenet.conftest import SMALL, losses

MODEL = (*SMALL, "-a", "resnet18", "--conv-cfg")
STEPS = ("--max-steps", "12", "--output-dir")


def test_they_train_resume_and_are_evaluated(shapes, run_main, tmp_path):
    whole, parts, graph = (tmp_path / name for name in ("whole", "parts", "graph"))
    text = run_main(shapes, *MODEL, "monarch", *STEPS, whole).stdout
    ours, dense = re.search(r"([\d,]+) parameters, dense ([\d,]+)", text).groups()
    assert int(dense.replace(",", "")) > 3 * int(ours.replace(",", ""))
    for steps in ("5", "12"):
        more = ("--max-steps", steps, "--resume", "auto", "--output-dir", parts)
        run_main(shapes, *MODEL, "monarch", *more)
    assert losses(parts) == losses(whole)
    run_main(shapes, *MODEL, "monarch", "--graph", *STEPS, graph)
    first, other = losses(whole)[1], losses(graph)[1]
    assert other == pytest.approx(first, rel=1e-4)
    text = run_main(shapes, *MODEL, "monarch", "-e", "--resume", whole / "checkpoints/best").stdout
    assert f"Loss {losses(whole, 'val')[12]:.4f}" in text


def test_weights_are_projected(shapes, run_main, tmp_path):
    """As exact as the structure can be, and then nothing is lost."""
    run_main(shapes, *MODEL, "dense", *STEPS, tmp_path / "out")
    weights = ("--weights", tmp_path / "out/checkpoints/step-00000012/model.safetensors")
    text = run_main(shapes, *MODEL, "{_target_: low_rank, rank: 512}", "-e", *weights).stdout
    groups = re.findall(r"^(layer\d): relative error ([\d.]+)$", text, re.MULTILINE)
    assert [group for group, _ in groups] == ["layer1", "layer2", "layer3", "layer4"]
    assert "relative error of 19 convolutions 0.000, of logits 0.000" in text
    loss = losses(tmp_path / "out", "val")[12]
    assert float(re.search(r"Loss ([\d.]+)", text).group(1)) == pytest.approx(loss, rel=1e-3)
    text = run_main(shapes, *MODEL, "monarch", "-e", *weights).stdout
    assert 0.3 < float(re.search(r"layer4: relative error ([\d.]+)", text).group(1)) < 0.9


def test_a_wrong_layer_is_refused(shapes, run_main, tmp_path):
    text = run_main(shapes, *MODEL, "monarc", *STEPS, tmp_path / "out", ok=False).stdout
    assert "did you mean 'monarch'" in text
    assert not (tmp_path / "out").exists()
