"""main.py --conv-cfg: structured convolutions from nothing, and those nearest to dense weights."""

from __future__ import annotations

import re

import pytest

from tests.resnet50_imagenet.conftest import SMALL, losses

# An epoch of 3 steps.
MODEL = (*SMALL, "-a", "resnet18", "-b", "32", "--max-steps", "3", "--conv-cfg")


def test_they_train_and_are_evaluated(shapes, run_main, tmp_path):
    text = run_main(shapes, *MODEL, "blockdiag", "--output-dir", tmp_path / "a").stdout
    ours, dense = re.findall(r"([\d,]+) parameters, dense ([\d,]+)", text)[0]
    # The first convolution, batch norms and the classifier are dense.
    rest = 3 * 64 * 49 + 9_600 + 512 * 3 + 3
    assert int(ours.replace(",", "")) - rest == (int(dense.replace(",", "")) - rest) / 4
    run_main(shapes, *MODEL, "blockdiag", "--graph", "--output-dir", tmp_path / "b")
    assert losses(tmp_path / "b")[1] == pytest.approx(losses(tmp_path / "a")[1], rel=1e-4)
    best = ("-e", "--resume", tmp_path / "a/checkpoints/best")
    text = run_main(shapes, *MODEL, "blockdiag", *best).stdout
    assert f"Loss {losses(tmp_path / 'a', 'val')[3]:.3f}" in text


def test_weights_are_projected(shapes, run_main, tmp_path):
    run_main(shapes, *MODEL, "dense", "--output-dir", tmp_path)
    weights = ("-e", "--weights", tmp_path / "checkpoints/step-00000003/model.safetensors")
    text = run_main(shapes, *MODEL, "{_target_: blockdiag, nblocks: 1}", *weights).stdout
    assert "all: relative error 0.000, of the logits of a batch 0.000" in text
    text = run_main(shapes, *MODEL, "blockdiag", *weights).stdout
    errors = re.findall(r"^layer\d: relative error (0\.\d+)$", text, re.MULTILINE)
    # Three quarters of the entries of random kernels are left out.
    assert [float(error) for error in errors] == pytest.approx([0.75**0.5] * 4, rel=0.02)
    text = run_main(shapes, *MODEL, "monarc", *weights, ok=False).stdout
    assert "did you mean 'monarch'" in text
