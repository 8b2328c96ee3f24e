"""`main.py --fsdp` and `trainer.fsdp` train as replicated runs do, and their checkpoints are any
run's."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest
import safetensors.numpy

from flow_train.checkpoint.folders import read_checkpoint
from flow_train.config import keys
from flow_train.config.schema import read
from resnet50_imagenet.options import parse_options
from tests.launch import run_several
from tests.monarch_flow.engine.engine_runs import values
from tests.resnet50_imagenet.conftest import SMALL, losses, shapes  # noqa: F401 - a fixture

MONARCH = ("experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp", "datamodule.image_size=32")
MONARCH += ("model.embed_dim=48", "model.num_heads=4", "model.patch_size=8", "model.depth=2")
MONARCH += ("model.num_classes=3", "datamodule.batch_size=4", "datamodule.num_workers=0", "seed=1")
MONARCH += ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.devices=2")
MONARCH += ("trainer.log_every_n_steps=1", "test_after_training=false", "trainer.precision=32")
MONARCH += ("callbacks.norm_monitor={}",)


def test_a_convolutional_network_with_running_statistics(shapes: Path, tmp_path: Path) -> None:  # noqa: F811
    """The moving average is one of shards; an epoch of 6 steps ends in the middle."""
    small = (shapes, *SMALL, "-b", 16)
    line = (*small, "--multiprocessing-distributed", "--model-ema")
    replicated, cut, one = (tmp_path / name for name in ("replicated", "cut", "one"))
    on = ("--resume", "auto")
    lines = [
        (*line, "--max-steps", 8, "--output-dir", replicated),
        (*line, "--max-steps", 5, "--fsdp", "--output-dir", cut),
        (*line, "--max-steps", 8, "--fsdp", "full_shard_no_recompute", *on, "--output-dir", cut),
    ]
    result = run_several("resnet50_imagenet.main", lines, 2)
    assert result.returncode == 0, result.stdout[-5000:]
    for split in ("train", "val"):
        ours, theirs = losses(cut, split), losses(replicated, split)
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-5)
    # A process by itself evaluates, and goes on with, what two have cut.
    whole, pieces = (read_checkpoint(folder / "checkpoints") for folder in (replicated, cut))
    assert pieces.layout is not None
    assert set(pieces.optimizer) == set(whole.optimizer)
    for ours, theirs in ((pieces.model, whole.model), (pieces.optimizer, whole.optimizer)):
        for name, array in theirs.items():
            atol = 1e-4 * max(1.0, float(abs(array).max()))
            np.testing.assert_allclose(ours[name], array, atol=atol, err_msg=name)
    # Averages of running statistics, too, are the first process's: those that a resumed run has.
    files = [safetensors.numpy.load_file(path) for path in pieces.folder.glob("shard-*")]
    uncut = [name for name in files[0] if name.endswith(("running_mean", "running_var"))]
    assert any(name.startswith("ema/") for name in uncut)
    for name in uncut:
        np.testing.assert_array_equal(files[0][name], files[1][name], err_msg=name)
    line = (*small, "--resume", cut)
    lines = [(*line, "-e"), (*line, "--output-dir", one, "--max-steps", 9)]
    result = run_several("resnet50_imagenet.main", lines)
    assert result.returncode == 0, result.stdout[-5000:]
    assert list(losses(one)) == [9]


def test_a_monarch_vit(shapes: Path, tmp_path: Path) -> None:  # noqa: F811
    line = (*MONARCH, f"datamodule.data_dir={shapes}")
    modes = ("null", "full_shard", "hybrid_shard")
    lines = [(*line, f"trainer.fsdp={mode}", f"run_dir={tmp_path / mode}") for mode in modes]
    lines.append((*line, "trainer.graph=true", f"run_dir={tmp_path / 'graph'}"))
    result = run_several("monarch_flow.train", lines, 2)
    assert result.returncode == 0, result.stdout[-5000:]
    figures = [("train", "loss"), ("val", "loss")]
    figures += [("train", "total_param_l1_norm"), ("train", "total_grad_l1_norm")]
    # Of whole tensors, not of the first process's pieces.
    figures += [("train", f"stats/head.weight{kind}_mean") for kind in ("", "_grad")]
    for mode in ("full_shard", "hybrid_shard", "graph"):
        for split, name in figures:
            ours, theirs = (values(tmp_path / each, split, name) for each in (mode, "null"))
            assert ours
            np.testing.assert_allclose(
                list(ours.values()), list(theirs.values()), rtol=1e-5, err_msg=f"{mode} {name}"
            )
    log = [json.loads(text) for text in (tmp_path / "full_shard/metrics.jsonl").open()]
    counted = [each["values"] for each in log if "params_total" in each["values"]]
    plain = [json.loads(text) for text in (tmp_path / "null/metrics.jsonl").open()]
    assert counted == [each["values"] for each in plain if "params_total" in each["values"]]


@pytest.mark.parametrize("other", ["--graph", "--channels-last"])
def test_what_does_not_go_together_is_refused(other: str) -> None:
    with pytest.raises(UserError, match="--fsdp"):
        parse_options(["--fsdp", other])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"graph": True}, "fsdp is for eager runs: leave graph out"),
        ({"precision": 16}, "fsdp is for float32 and bfloat16: take precision=bfloat16"),
    ],
)
def test_the_key_is_for_eager_runs_without_a_scaled_loss(more: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read(keys.Trainer, {"max_epochs": 1, "fsdp": "full_shard", **more}, "trainer")
