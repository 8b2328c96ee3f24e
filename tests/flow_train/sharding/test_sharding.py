"""A model that is cut over processes trains as one that is not (fsdp_llama_spec B.2)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oneflow_accel
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.config import keys
from flow_train.hooks import NormMonitor
from flow_train.sharding import fully_shard
from flow_train.sharding.model import blocks
from flow_train.steps.eager import EagerStep, TrainStep
from flow_train.steps.sharding import ShardedStep
from tests.flow_train.sharding.sharding_worker import TOKENS, SmallResNet
from tests.launch import run_distributed

WORKER = Path(__file__).with_name("sharding_worker.py")
CASES: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "flat": {"flatten": True, "multiple": 8},
    "activations kept": {"recompute": False},
    "weights kept": {"reshard_after_forward": False},
    "all kept": {"reshard_after_forward": False, "recompute": False},
    "prefetched": {"prefetch": True},
    "prefetched, activations kept": {"prefetch": True, "recompute": False},
    "accumulated": {"accumulate": 2},
    "accumulated without exchange": {"accumulate": 2, "no_sync": True},
    "monarch": {"kind": "monarch"},
    "dropout": {"kind": "dropout"},
    "resnet": {"kind": "resnet"},
    "resnet, flat": {"kind": "resnet", "flatten": True},
    "added up in bfloat16": {"kind": "resnet", "reduce_dtype": "bfloat16"},
    "bfloat16": {"bfloat16": True},
    "bfloat16, activations kept": {"recompute": False, "bfloat16": True},
}
if not plugin.state().loaded:
    CASES = {name: case for name, case in CASES.items() if "bfloat16" not in name}
MODES = list(CASES)[:7]
MESHES = {"one row": {}, "rows of two": {"rows": 2}, "rows of one": {"rows": 1, "flatten": True}}


def uncommon(*modes: str) -> dict[str, dict[str, Any]]:
    """Each uncommon model in each of some modes."""
    kinds = (*TOKENS, "resnet, mixed")
    return {f"{kind}, {mode}": {**CASES[mode], "kind": kind} for kind in kinds for mode in modes}


RUNS = {
    "2": (2, CASES | uncommon("recomputed", "weights kept", "prefetched, activations kept"), "on"),
    # Without shared memory pieces are sent.
    "2, sent": (2, {name: CASES[name] for name in MODES[:2]}, "off"),
    "2, all sent": pytest.param(
        2,
        {name: CASES[name] for name in MODES[2:]} | uncommon("flat", "activations kept"),
        "off",
        marks=pytest.mark.release,
    ),
    "4": (4, MESHES, "on"),
}


@pytest.mark.parametrize(("processes", "cases", "memory"), RUNS.values(), ids=RUNS)
def test_cut_models_train_as_whole_ones(
    tmp_path: Path, processes: int, cases: Any, memory: str
) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    environment = {"ONEFLOW_ACCEL_THREADS": "1", "ONEFLOW_ACCEL_SHARED_MEMORY": memory}
    result = run_distributed([WORKER, path], processes, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    found = json.loads(path.with_suffix(".out").read_text())
    assert found.keys() == cases.keys()
    for name, gaps in found.items():
        # Gradients of a product are rounded to bfloat16 for each process's share of the images.
        wider = 1e4 if "bfloat16" in name else 1
        assert gaps["losses"] < 1e-6 * wider, (name, gaps)
        assert gaps["norms"] < 1e-6 * wider, (name, gaps)
        assert gaps["weights"] < 1e-5 * wider, (name, gaps)
        assert gaps["norms"] > 1e-5 or "added up" not in name, "nothing was rounded"


def test_names_stay_and_shapes_are_known() -> None:
    model = SmallResNet()
    is_unit = blocks(model)
    names = [name for name, module in model.named_modules() if is_unit(name, module)]
    assert names == ["layers.0", "layers.1"]
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    with pytest.raises(UserError, match="multiple=0"):
        fully_shard(nn.Linear(2, 2), multiple=0)
    assert fully_shard(model, multiple=4).layout.tensors() == shapes
    for name, value in model.named_parameters():
        assert value.ndim == 1
        assert len(value) == -(-np.prod(shapes[name]) // 4) * 4, name


@pytest.mark.parametrize(
    ("sbp", "names", "message"),
    [
        (flow.sbp.split(0), ("weight", "bias"), "weight is split by another parallelism already"),
        (flow.sbp.broadcast, ("weight",), "bias: a unit's tensors must all be global"),
    ],
)
def test_global_tensors_that_cannot_be_cut_are_refused(
    sbp: flow.sbp.sbp, names: tuple[str, ...], message: str
) -> None:
    model = nn.Linear(2, 2)
    for name in names:
        value = getattr(model, name).detach().to_global(flow.placement("cpu", [0]), sbp)
        setattr(model, name, nn.Parameter(value))
    with pytest.raises(UserError, match=message):
        fully_shard(model)


def test_a_root_without_global_tensors_of_its_own() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    model.to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    x = flow.ones(1, 2).to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    expected = model(x).to_local().numpy()
    sharding = fully_shard(model)
    with sharding.no_sync():
        model(x).sum().backward()
    assert float(sharding.gradient_norm().numpy()) == 0
    np.testing.assert_array_equal(model(x).to_local().numpy(), expected)


def _sgd(model: nn.Module) -> flow.optim.Optimizer:
    return flow.optim.SGD(model.parameters(), lr=0.1)


def test_norms_are_of_whole_tensors_where_shards_are_flat() -> None:
    backend, logged = oneflow_accel.select_device("cpu"), {}
    draw = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    loss = nn.functional.cross_entropy
    for name in ("whole", "flat"):
        flow.manual_seed(0)
        model = SmallResNet()
        step: TrainStep
        if name == "whole":
            step = EagerStep(model, backend, _sgd(model), loss)
        else:
            step = ShardedStep(model, backend, _sgd, loss, sharding={"flatten": True})
        model(flow.tensor(draw)).square().mean().backward()
        log = logged.setdefault(name, {}).update
        trainer = SimpleNamespace(is_log_step=True, model=model, train_step=step, log=log)
        NormMonitor(keys.NormMonitor()).before_update(trainer)
    assert "stats/layers.0.0.0.weight_grad_mean" in logged["whole"]
    assert logged["flat"] == pytest.approx(logged["whole"], rel=1e-6)


def test_gradients_of_inputs_pass_through() -> None:
    flow.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 2)))
    x = flow.randn(4, 3, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad.numpy().copy(), None
    fully_shard(model)
    model(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6)


def test_a_second_forward_pass_that_fails_leaves_statistics_as_they_were() -> None:
    """That pass, which the gradient needs."""
    passes = iter([None, RuntimeError("no memory")])

    def fail(module: nn.Module, inputs: Any) -> None:
        error = next(passes)
        if error:
            raise error

    block = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())
    block[1].register_forward_pre_hook(fail)
    model = nn.Sequential(block, nn.Linear(3, 2))
    fully_shard(model)
    loss = model(flow.randn(4, 3)).sum()
    before = block[0].running_mean.numpy().copy()
    with pytest.raises(Exception, match="no memory"):
        loss.backward()
    np.testing.assert_array_equal(block[0].running_mean.numpy(), before)
