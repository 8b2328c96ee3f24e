"""run_vit_training.py as a user calls it, on pictures of shapes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flow_train.checkpoint.folders import read_checkpoint
from tests.launch import REPOSITORY, run_several
from tests.resnet50_imagenet.conftest import shapes  # noqa: F401 - a fixture

SCRIPT = REPOSITORY / "vit_10b" / "run_vit_training.py"
# 8 steps per epoch. 30 channels are no multiple of 4 processes, nor is the number of classes.
SMALL = ("--image_size", "16", "--patch_size", "8", "--embed_dim", "30", "--num_heads", "2")
SMALL += ("--num_blocks", "2", "--batch_size", "12", "--num_workers", "0", "--num_epochs", "2")
SMALL += ("--log_step_interval", "1", "--seed", "3", "--warmup_steps", "2", "--lr", "0.003")
SMALL += ("--clip_grad_norm", "0.5", "--test_epoch_interval", "2")


def run_vit(
    lines: Sequence[Sequence[object]], processes: int = 1, *, ok: bool = True
) -> subprocess.CompletedProcess[str]:
    """Command lines one after the other, in so many processes."""
    timeout = 60 + 20 * len(lines)
    result = run_several("vit_10b.run_vit_training", lines, processes, timeout=timeout)
    assert (result.returncode == 0) == ok, result.stdout[-5000:]
    return result


def values(folder: Path, name: str, split: str = "train") -> list[float]:
    """A figure of every step that was logged. A validation whose epoch's end was not saved any more
    is logged once more by the run that goes on."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line["values"][name] for line in lines if line["split"] == split}
    return list(found.values())


def weights(folder: Path) -> dict[str, np.ndarray]:
    return dict(read_checkpoint(folder / "checkpoints").model)


def largest_gap(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Of the weights, relative to the largest of each."""
    assert found.keys() == expected.keys()
    # The gradient of attention's key biases is zero but for rounding, which Adam's eps blows up.
    return max(
        float(abs(found[name] - value).max() / abs(value).max())
        for name, value in expected.items()
        if not name.endswith(("qkv.bias", "k_proj.bias"))
    )
