"""What a training recipe adds: accumulation, clipping, a moving average, mixing, augmentation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.resnet50_imagenet.conftest import SMALL, RunMain, losses

RECIPE = ("--clip-grad", "0.5", "--smoothing", "0.1", "--model-ema", "--model-ema-decay", "0.9")
RECIPE += ("--mixup", "0.8", "--cutmix", "1.0", "--aa", "rand-m9-mstd0.5-inc1", "--reprob", "0.25")


@pytest.fixture(scope="module")
def whole(shapes: Path, run_main: RunMain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all of it, over the end of an epoch."""
    out = tmp_path_factory.mktemp("recipe") / "out"
    run_main(shapes, *SMALL, *RECIPE, "--max-steps", "14", "--output-dir", out)
    return out


def test_a_recipe_is_resumed_to_the_last_bit(shapes, run_main, whole, tmp_path) -> None:
    out = tmp_path / "out"
    for steps in ("5", "14"):
        more = ("--max-steps", steps, "--resume", "auto", "--output-dir", out)
        run_main(shapes, *SMALL, *RECIPE, *more)
    assert losses(out) == losses(whole)
    assert losses(out, "val") == losses(whole, "val")


def test_a_recipe_in_channels_last(shapes, run_main, whole, tmp_path) -> None:
    """Under nn.Graph: test_runs.py."""
    more = ("--channels-last", "--max-steps", "14", "--output-dir", tmp_path / "out")
    run_main(shapes, *SMALL, *RECIPE, *more)
    ours, theirs = losses(tmp_path / "out"), losses(whole)
    assert ours.keys() == theirs.keys()
    # Rounding grows from step to step.
    for step in range(1, 9):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-3)


@pytest.mark.parametrize("out_of", range(7))
def test_each_part_of_a_recipe_changes_the_run(shapes, run_main, whole, tmp_path, out_of) -> None:
    """Without it the losses are others; without the average it is the validation's alone."""
    parts = [["--clip-grad", "0.5"], ["--smoothing", "0.1"], ["--model-ema"], ["--mixup", "0.8"]]
    parts += [["--cutmix", "1.0"], ["--aa", "rand-m9-mstd0.5-inc1"], ["--reprob", "0.25"]]
    left = [word for number, part in enumerate(parts) if number != out_of for word in part]
    if "--model-ema" in left:
        left += ["--model-ema-decay", "0.9"]
    steps = "12" if out_of == 2 else "2"
    run_main(shapes, *SMALL, *left, "--max-steps", steps, "--output-dir", tmp_path / "out")
    ours, theirs = losses(tmp_path / "out"), losses(whole)
    same = all(ours[step] == theirs[step] for step in ours)
    assert same == (out_of == 2)
    if out_of == 2:
        assert losses(tmp_path / "out", "val") != losses(whole, "val")


def test_evaluation_takes_the_moving_average(shapes, run_main, whole) -> None:
    """Of a checkpoint whose run had one, as that run did."""
    out = run_main(shapes, *SMALL, "-e", "--no-fold", "--resume", whole / "checkpoints/best").stdout
    assert "their moving averages are evaluated" in out
    assert f"Loss {losses(whole, 'val')[12]:.4f}" in out
    # And says how far it is.
    assert "val: [3/3]" in out


def test_batches_that_are_accumulated_are_one_batch(shapes, run_main, tmp_path) -> None:
    """Twice 4 images and once 8: with frozen statistics, without momentum's rounding."""
    frozen = ("--freeze-bn", "--max-steps", "6", "--hflip", "0", "--scale", "1", "1")
    one, two = tmp_path / "one", tmp_path / "two"
    run_main(shapes, *SMALL, *frozen, "--output-dir", one)
    run_main(shapes, *SMALL, *frozen, "-b", "4", "--grad-accum-steps", "2", "--output-dir", two)
    assert losses(two).keys() == losses(one).keys()
    np.testing.assert_allclose(list(losses(two).values()), list(losses(one).values()), rtol=1e-4)
    folder = two / "checkpoints" / "step-00000006"
    state = json.loads((folder / "state.json").read_text())["content"]["state"]
    assert (state["batch"], state["accumulate"]) == (12, 2)
    theirs = load_file(one / "checkpoints" / "step-00000006" / "model.safetensors")
    for name, array in load_file(folder / "model.safetensors").items():
        if array.dtype == np.float32:
            np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--aa", "flip-m9"), "rand"),
        (("--clip-grad", "0"), "above 0"),
        (("--smoothing", "1"), "nothing of the labels"),
        (("--mixup", "-1"), "--mixup"),
    ],
)
def test_wrong_recipes_are_refused(shapes, run_main, tmp_path, options, words) -> None:
    out = run_main(shapes, *SMALL, *options, "--output-dir", tmp_path / "out", ok=False).stdout
    assert words in out
    assert not (tmp_path / "out").exists()
