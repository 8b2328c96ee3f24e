"""Where a run starts from, and what it refuses."""

from __future__ import annotations

from oneflow_accel.errors import CheckpointError, DataError, UserError

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.monarch_flow.engine.engine_runs import MONARCH, last_checkpoint, values

_NO_TRAINING = ("optimizer.lr=0.0", "scheduler.lr_min=0.0", "scheduler.warmup_lr_init=0.0")
_ONE = ("trainer.max_epochs=1", "test_after_training=false")


@pytest.fixture(scope="module")
def dense(digits, tmp_path_factory):
    from monarch_flow.engine.run import run
    from tests.monarch_flow.engine.engine_runs import config

    folder = tmp_path_factory.mktemp("dense")
    run(config(digits, folder, "model.mlp_cfg=null", "trainer.max_epochs=2"))
    return folder


def test_starts_from_the_weights_of_another_run(dense, run_tiny, tmp_path):
    """The best checkpoint's, strictly; with a learning rate of 0 they stay."""
    source = f"train.init_from.path={dense}"
    run_tiny(tmp_path / "a", *_ONE, *_NO_TRAINING, "model.mlp_cfg=null", source)
    ours = last_checkpoint(tmp_path / "a")
    best = (dense / "checkpoints/best").read_text().strip()
    from flow_train.checkpoint.folders import read_checkpoint

    theirs = read_checkpoint(dense / "checkpoints" / best)
    for name, array in theirs.model.items():
        np.testing.assert_array_equal(ours.model[name], array, err_msg=name)
    assert values(tmp_path / "a", "val")[8] == pytest.approx(
        values(dense, "val")[int(best.removeprefix("step-"))], rel=1e-6
    )


def test_projects_a_dense_run(dense, run_tiny, tmp_path):
    """One block is the dense matrix: nothing is lost. Else the projection is the nearest."""
    whole = {**MONARCH, "nblocks": 1}
    mlp = {"_target_": "monarch_flow.layers.MlpCustom", "linear1_cfg": whole, "linear2_cfg": whole}
    from tests.monarch_flow.engine.engine_runs import config

    base = OmegaConf.to_container(config(dense, tmp_path).model)
    model = {**base, "mlp_cfg": mlp, "attnlinear_cfg": whole}
    source = (f"train.init_from.path={dense}", "train.init_from.project=true")
    run_tiny(tmp_path / "a", *_ONE, *_NO_TRAINING, *source, model=model)
    best = int((dense / "checkpoints/best").read_text().strip().removeprefix("step-"))
    assert values(tmp_path / "a", "val")[8] == pytest.approx(values(dense, "val")[best], rel=1e-4)


def test_dense_weights_need_the_projection(dense, run_tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"project=true"):
        run_tiny(tmp_path, *_ONE, f"train.init_from.path={dense}")


def test_published_recipe_trains_in_float32_where_there_is_no_mixed_precision(
    run_tiny, tmp_path, caplog
):
    run_tiny(tmp_path, *_ONE, "trainer.precision=16")
    assert "trainer.precision=16 becomes float32" in caplog.text
    assert OmegaConf.load(tmp_path / "config.yaml").trainer.precision == "float32"


def test_structured_layers_do_not_go_on_from_a_dense_run(dense, run_tiny, tmp_path):
    """By the run's folder. What became dense in its run, or will in this one, goes on."""
    words = "layers are dense, and those of this run are structured.*init_from.project=true"
    with pytest.raises(CheckpointError, match=words):
        run_tiny(tmp_path, f"resume={dense}")
    more = ("trainer.max_steps=17", "trainer.max_epochs=3", "train.sparse_to_dense.fraction=0.5")
    run_tiny(tmp_path, f"resume={dense}", *more, "test_after_training=false")
    assert last_checkpoint(tmp_path).state["phase"] == "dense"


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        pytest.param(("datamodule.data_dir=/nowhere",), DataError, "/nowhere", id="no-data"),
        pytest.param(("trainer.precision=8",), UserError, "32, 16, bf16", id="precision"),
        pytest.param(("model.num_classes=7",), UserError, r"model\.num_classes", id="classes"),
        pytest.param(("model.name=vit_tiny",), UserError, "vit_tiny_patch", id="model"),
        pytest.param(("resume=/nowhere",), CheckpointError, "/nowhere", id="no-checkpoint"),
        pytest.param(
            ("eval.ckpt=/nowhere",), CheckpointError, "/nowhere", id="nothing-to-evaluate"
        ),
        pytest.param(("train.init_from.path=/nowhere",), UserError, "/nowhere", id="no-weights"),
        pytest.param(
            ("train.init_from={path: x, project: true}", "model.mlp_cfg=null"),
            UserError,
            "no structured layer",
            id="nothing-to-project-onto",
        ),
        pytest.param(
            ("trainer.limit_val_batches=2.5", "trainer.fast_dev_run=1"),
            UserError,
            "limit_val_batches: 2.5 is neither a number of global batches nor a share",
            id="no-limit",
        ),
        pytest.param(("trainer.limit_train_batches=0",), UserError, "has no step", id="no-batches"),
        pytest.param(("trainer.max_epochs=null",), UserError, "no end", id="endless"),
        pytest.param(
            ("train.sparse_to_dense.fraction=0.5", "model.mlp_cfg=null"),
            UserError,
            "no structured layer to become dense",
            id="nothing-to-make-dense",
        ),
        pytest.param(("callbacks.speed={}",), UserError, "callbacks.speed", id="callback"),
        pytest.param(
            ("callbacks.model_checkpoint.monitor=val/f1",), UserError, "val/acctop5", id="monitor"
        ),
        pytest.param(
            ("scheduler.warmup_lr_init=1e30",), UserError, "loss is", id="non-finite-loss"
        ),
    ],
)
def test_user_errors(run_tiny, tmp_path, overrides, error, text):
    with pytest.raises(error, match=text):
        run_tiny(tmp_path / "out", "trainer.max_epochs=1", *overrides)
