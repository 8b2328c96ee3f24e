"""main.py --conv-cfg: structured convolutions from nothing, and those nearest to dense weights."""

from __future__ import annotations

import re

import pytest

from tests.resnet50_imagenet.conftest import SMALL, losses

# An epoch of 3 steps.
MODEL = (*SMALL, "-a", "resnet18", "-b", "32", "--max-steps", "3", "--conv-cfg")


def test_they_train_resume_and_are_evaluated(shapes, run_main, tmp_path):
    whole, graph = tmp_path / "whole", tmp_path / "graph"
    text = run_main(shapes, *MODEL, "monarch", "--output-dir", whole).stdout
    # Of 16 convolutions of 3 x 3 and 3 of 1 x 1: (in k k out + out^2) / 4, by the layer's table.
    widths = [(64, 64, 9)] * 4 + [(64, 128, 9), (64, 128, 1), (128, 256, 9), (128, 256, 1)]
    widths += [(256, 512, 9), (256, 512, 1), *[(128, 128, 9), (256, 256, 9), (512, 512, 9)] * 3]
    saved = sum(n * m * k - (n * m * k + min(n * k, m) ** 2) // 4 for n, m, k in widths)
    ours, dense = re.search(r"([\d,]+) parameters, dense ([\d,]+)", text).groups()
    assert int(ours.replace(",", "")) == int(dense.replace(",", "")) - saved
    run_main(shapes, *MODEL, "monarch", "--graph", "--output-dir", graph)
    assert losses(graph)[1] == pytest.approx(losses(whole)[1], rel=1e-4)
    text = run_main(shapes, *MODEL, "monarch", "-e", "--resume", whole / "checkpoints/best").stdout
    assert f"Loss {losses(whole, 'val')[3]:.4f}" in text


def test_weights_are_projected(shapes, run_main, tmp_path):
    run_main(shapes, *MODEL, "dense", "--output-dir", tmp_path)
    weights = ("-e", "--weights", tmp_path / "checkpoints/step-00000003/model.safetensors")
    text = run_main(shapes, *MODEL, "{_target_: blockdiag, nblocks: 1}", *weights).stdout
    assert "all: relative error 0.000, of the logits of a batch 0.000" in text
    loss = float(re.findall(r"Loss (\d\.\d+)", text)[-1])
    assert loss == pytest.approx(losses(tmp_path, "val")[3], rel=1e-3)
    text = run_main(shapes, *MODEL, "blockdiag", *weights).stdout
    errors = re.findall(r"^layer\d: relative error (0\.\d+)$", text, re.MULTILINE)
    # Three quarters of the entries of random kernels are left out.
    assert [float(error) for error in errors] == pytest.approx([0.75**0.5] * 4, rel=0.02)


def test_a_wrong_layer_is_refused(shapes, run_main, tmp_path):
    text = run_main(shapes, *MODEL, "monarc", "--output-dir", tmp_path / "out", ok=False).stdout
    assert "did you mean 'monarch'" in text
    assert not (tmp_path / "out").exists()
