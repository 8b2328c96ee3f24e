"""`main.py --fsdp` and `trainer.fsdp` train as replicated runs do, and their checkpoints are any
run's."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np
import pytest
import safetensors.numpy

from flow_train.checkpoint.folders import read_checkpoint
from flow_train.config import keys
from flow_train.config.schema import read
from flow_train.metrics.log import read_metrics
from resnet50_imagenet.options import parse_options
from tests.launch import run_distributed, run_several, several_runs
from tests.monarch_flow.engine.engine_runs import values
from tests.resnet50_imagenet.conftest import SMALL, losses, shapes  # noqa: F401 - a fixture

MONARCH = ("experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp", "datamodule.image_size=32")
MONARCH += ("model.embed_dim=48", "model.num_heads=4", "model.patch_size=8", "model.depth=2")
MONARCH += ("model.num_classes=3", "datamodule.batch_size=4", "datamodule.num_workers=0", "seed=1")
MONARCH += ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.devices=2")
MONARCH += ("trainer.log_every_n_steps=1", "test_after_training=false", "trainer.precision=32")
MONARCH += ("callbacks.norm_monitor={}",)


SMALLER = (*SMALL, "-b", 16)


@pytest.fixture(scope="module")
def runs(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The folder of runs of two processes."""
    folder = tmp_path_factory.mktemp("runs")
    line = ("resnet50_imagenet.main", shapes, *SMALLER, "--multiprocessing-distributed")
    line += ("--model-ema", "--output-dir")
    on = ("--fsdp", "full_shard_no_recompute", "--resume", "auto")
    # An epoch of 6 steps ends in the middle.
    lines = [
        (*line, folder / "replicated", "--max-steps", 8),
        (*line, folder / "cut", "--max-steps", 5, "--fsdp"),
        (*line, folder / "cut", "--max-steps", 8, *on),
    ]
    line = ("monarch_flow.train", *MONARCH, f"datamodule.data_dir={shapes}")
    for mode in ("null", "full_shard", "hybrid_shard"):
        lines.append((*line, f"trainer.fsdp={mode}", f"run_dir={folder / mode}"))
    lines.append((*line, "trainer.graph=true", f"run_dir={folder / 'graph'}"))
    line += ("trainer.max_epochs=2", "trainer.limit_train_batches=2", "callbacks.ema.decay=0.5")
    line += ("train.sparse_to_dense.fraction=0.5",)
    for mode in ("null", "shard_grad_op"):
        lines.append((*line, f"trainer.fsdp={mode}", f"run_dir={folder / f'switched-{mode}'}"))
    result = run_distributed(several_runs(lines), 2, timeout=240)
    assert result.returncode == 0, result.stdout[-5000:]
    return folder


def test_a_convolutional_network_with_running_statistics(
    runs: Path,
    shapes: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The moving average is one of shards."""
    replicated, cut = runs / "replicated", runs / "cut"
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
    line = (shapes, *SMALLER, "--resume", cut)
    lines = [(*line, "-e"), (*line, "--output-dir", tmp_path, "--max-steps", 9)]
    result = run_several("resnet50_imagenet.main", lines)
    assert result.returncode == 0, result.stdout[-5000:]
    assert list(losses(tmp_path)) == [9]


def test_a_monarch_vit(runs: Path) -> None:
    figures = [("train", "loss"), ("val", "loss")]
    figures += [("train", "total_param_l1_norm"), ("train", "total_grad_l1_norm")]
    # Of whole tensors, not of the first process's pieces.
    figures += [("train", f"stats/head.weight{kind}_mean") for kind in ("", "_grad")]
    for mode in ("full_shard", "hybrid_shard", "graph"):
        for split, name in figures:
            ours, theirs = (values(runs / each, split, name) for each in (mode, "null"))
            assert ours
            np.testing.assert_allclose(
                list(ours.values()), list(theirs.values()), rtol=1e-5, err_msg=f"{mode} {name}"
            )
    counted, plain = (
        [line["values"] for line in read_metrics(runs / mode / "metrics.jsonl")]
        for mode in ("full_shard", "null")
    )
    assert [each for each in counted if "params_total" in each] == [
        each for each in plain if "params_total" in each
    ]


def test_layers_that_become_dense(runs: Path) -> None:
    """And the moving average, by which is validated."""
    ours, theirs = (runs / f"switched-{mode}" for mode in ("shard_grad_op", "null"))
    names = ("loss_before", "loss_after", "average_loss_before", "average_loss_after")
    for split, name in [("train", "loss"), ("val", "loss"), *(("switch", name) for name in names)]:
        found, expected = (list(values(each, split, name).values()) for each in (ours, theirs))
        assert found == pytest.approx(expected, rel=1e-5), name
    before, after = (values(ours, "switch", f"average_loss_{when}") for when in ("before", "after"))
    assert after == pytest.approx(before, rel=1e-5)


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
