"""Sparse to dense and back on ViTAE: what its switch has to carry over that a ViT does not have,
BatchNorm's statistics, frozen random features and dropout that is always on; all Monarch layers."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flow_train.checkpoint.folders import Checkpoint
from monarch_flow.engine import sparse_to_dense
from monarch_flow.engine.run import run
from monarch_flow.projection import LayerSpec, densify_training_state, monarch_to_dense
from tests.monarch_flow.engine.engine_runs import (
    EVERYTHING,
    MONARCH,
    MONARCH_MLP,
    assert_same_run,
    config,
    last_checkpoint,
    values,
)

TINY: dict[str, Any] = {
    "name": "ViTAE_basic_Tiny",
    "embed_dims": [8, 8, 16],
    "token_dims": [8, 8, 32],
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "conv_groups": 4,
    "drop_path_rate": 0.2,
}
SPARSE = {**TINY, "mlp_cfg": MONARCH_MLP, "attnlinear_cfg": MONARCH}
# Of two cells: query, key and value, and the two layers of the MLP.
LAYERS = [
    f"layers.2.NC.{cell}.{layer}"
    for cell in range(2)
    for layer in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc1", "mlp.fc2")
]
FROZEN = ["layers.0.RC.attn.w", "layers.1.RC.attn.w"]
STATISTICS, COUNT = ("running_mean", "running_var"), "num_batches_tracked"
# 2 epochs of 3 steps of two batches; the second is dense.
HALF = (*EVERYTHING, "trainer.max_epochs=2", "train.sparse_to_dense.fraction=0.5")
HALF += ("trainer.limit_train_batches=3", "trainer.limit_val_batches=1")
NO_TEST = "test_after_training=false"


class _Switch:
    def __init__(self) -> None:
        self.taken: list[tuple[Checkpoint, Checkpoint]] = []
        self.frozen: list[str] = []

    def __call__(self, trainer: Any, layers: Any) -> None:
        # A copy, as arrays share memory with what is being trained.
        before = copy.deepcopy(trainer.checkpoint())
        _SWITCH(trainer, layers)
        self.taken.append((before, copy.deepcopy(trainer.checkpoint())))
        named = trainer.model.named_parameters()
        self.frozen = [name for name, value in named if not value.requires_grad]


_SWITCH = sparse_to_dense.switch


@pytest.fixture(scope="module")
def watched(digits, tmp_path_factory) -> tuple[Path, _Switch]:
    """An uninterrupted run with a checkpoint of each step, and what it held at its switch."""
    folder, switch = tmp_path_factory.mktemp("vitae"), _Switch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_to_dense, "switch", switch)
        patch.setattr("monarch_flow.engine.run._KEEP_LAST", 99)
        each = "callbacks.model_checkpoint.every_n_train_steps=1"
        run(config(digits, folder, *HALF, each, model=SPARSE))
    return folder, switch


def _assert_no_jump(run_dir: Path, step: int) -> None:
    for name in ("loss", "average_loss"):
        before = values(run_dir, "switch", f"{name}_before")
        after = values(run_dir, "switch", f"{name}_after")
        assert before.keys() == after.keys() == {step}
        assert after[step] == pytest.approx(before[step], rel=1e-5, abs=1e-5)


def test_the_switch_carries_everything_over(watched):
    """Dense weights and moments against the float64 formulas, the rest to the last bit."""
    folder, switch = watched
    _assert_no_jump(folder, 3)
    ((before, after),) = switch.taken
    sparse = {name for name in before.model if name.rpartition(".")[2] in ("blkdiag1", "blkdiag2")}
    assert {name.rpartition(".")[0] for name in sparse} == set(LAYERS)
    specs = {
        layer: LayerSpec(
            "monarch",
            before.model[f"{layer}.blkdiag1"].shape[2] * 4,
            len(before.model[f"{layer}.bias"]),
            4,
        )
        for layer in LAYERS
    }
    wanted = densify_training_state(before.model, before.optimizer, specs)
    assert set(after.model) == set(wanted.model)
    assert set(after.optimizer) == set(wanted.optimizer)
    for layer in LAYERS:
        factors = [before.model[f"{layer}.blkdiag{i}"].astype(np.float64) for i in (1, 2)]
        weight = after.model[f"{layer}.weight"]
        np.testing.assert_allclose(weight, monarch_to_dense(*factors), rtol=1e-6, atol=1e-7)
        assert weight.dtype == np.float32
    dense = {f"{layer}.weight" for layer in LAYERS}
    for name in set(after.model) - dense:
        np.testing.assert_array_equal(after.model[name], before.model[name], err_msg=name)
    for key, array in after.optimizer.items():
        name = key.partition("/")[2]
        other = wanted.optimizer if name in dense else before.optimizer
        np.testing.assert_allclose(array, other[key], rtol=1e-6, err_msg=key)
        if name not in dense:
            np.testing.assert_array_equal(array, before.optimizer[key], err_msg=key)
    trained = {
        name
        for name in after.model
        if name not in FROZEN and name.rpartition(".")[2] not in (*STATISTICS, COUNT)
    }
    averaged = trained | {name for name in after.model if name.rpartition(".")[2] in STATISTICS}
    assert _names(after, "exp_avg/") == _names(after, "exp_avg_sq/") == trained
    assert _names(after, "ema/") == averaged
    assert switch.frozen == FROZEN
    for key in ("epoch", "batch", "step", "train_step", "callbacks"):
        assert after.state[key] == before.state[key]
    assert (before.state["phase"], after.state["phase"]) == ("monarch", "dense")


def _names(checkpoint: Checkpoint, prefix: str) -> set[str]:
    return {key.removeprefix(prefix) for key in checkpoint.optimizer if key.startswith(prefix)}


def test_training_goes_on_after_the_switch(watched):
    """What was trained moves, what was frozen does not, statistics are gathered."""
    folder, switch = watched
    ((_, after),) = switch.taken
    end = last_checkpoint(folder).model
    assert end.keys() == after.model.keys()
    still = {name for name in end if np.array_equal(end[name], after.model[name])}
    assert still == set(FROZEN)
    # 3 steps of two batches.
    name = f"layers.2.NC.0.PCM.1.{COUNT}"
    assert end[name] - after.model[name] == 6


@pytest.mark.parametrize("stop", ["step-00000003", "step-00000005"])
def test_resumed_run_equals_the_whole_one(watched, run_tiny, tmp_path, stop):
    """From right before the switch, and from after it: equal to the last bit."""
    parts = tmp_path / "run"
    shutil.copytree(watched[0], parts)
    for later in (parts / "checkpoints").glob("step-*"):
        if later.name > stop:
            shutil.rmtree(later)
    assert last_checkpoint(parts).state["phase"] == ("dense" if stop[-1] == "5" else "monarch")
    run_tiny(parts, *HALF, "resume=auto", model=SPARSE)
    assert_same_run(parts, watched[0])
