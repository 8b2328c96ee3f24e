"""Steps under nn.Graph: random factors, windows of fewer batches, gradients, resuming."""

from __future__ import annotations

from typing import Any

import oneflow_accel

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import build_loss, build_optimizer
from flow_train.steps.eager import EagerStep, TrainStep
from flow_train.steps.graph import GraphStep, StepFactors, copy_model
from flow_train.task import ImageTask
from monarch_flow.layers import Dropout, DropPath, dropout
from tests.monarch_flow.engine.engine_runs import (
    EVERYTHING,
    last_checkpoint,
    values,
)

# 16 batches an epoch, 3 to a step: the sixth step takes one.
_RUN = (
    *EVERYTHING,
    "trainer.accumulate_grad_batches=3",
    "trainer.max_epochs=2",
    "callbacks.norm_monitor={}",
    "test_after_training=false",
)


def test_random_resumed_runs_equal_eager_ones(run_tiny, tmp_path):
    """Mixup, dropout, drop path, a step of fewer batches, which a resumed run's first graph is of,
    clipping, EMA, norms of gradients."""
    graph, eager = tmp_path / "graph", tmp_path / "eager"
    run_tiny(graph, *_RUN, "trainer.graph=true", "trainer.max_steps=5")
    run_tiny(graph, *_RUN, "trainer.graph=true", "resume=auto")
    run_tiny(eager, *_RUN)
    assert list(values(graph)) == list(range(1, 13))
    figures = (("train", "loss"), ("train", "acc1"), ("train", "lr"), ("val", "loss"))
    norms = (("train", "total_grad_l1_norm"), ("train", "total_param_l1_norm"))
    for split, name in (*figures, *norms):
        ours, theirs = (values(folder, split, name) for folder in (graph, eager))
        assert ours.keys() == theirs.keys()
        rtol = 1e-4 if "norm" in name else 1e-5
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)
    ours, theirs = last_checkpoint(graph).optimizer, last_checkpoint(eager).optimizer
    assert ours.keys() == theirs.keys()


def _batch(size: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    images = random.standard_normal((size, 3, 6, 6)).astype(np.float32)
    return {"images": images, "labels": np.arange(size) % 4 % 3}


class _Net(nn.Module):
    """Running statistics, a frozen parameter, dropout and drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.path, self.drop = DropPath(0.3), Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.frozen = nn.Parameter(flow.ones(8), requires_grad=False)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        x = self.norm(self.conv(x))
        x = (x + self.path(flow.relu(x))).mean(dim=(2, 3))
        return self.head(self.drop(x * self.frozen))


def _steps() -> dict[str, TrainStep]:
    """In parts of 4 images."""
    backend = oneflow_accel.select_device()
    flow.manual_seed(0)
    model, task = _Net().to(backend.device()), ImageTask(build_loss(None))

    def optimizer(model: nn.Module) -> Any:
        return build_optimizer(model, {"name": "adamw", "lr": 1e-2})

    eager = copy_model(model)
    return {
        "eager": EagerStep(eager, backend, optimizer(eager), task, clip=0.1, part_size=4),
        "graph": GraphStep(
            model,
            backend,
            optimizer,
            task,
            clip=0.1,
            learning_rate=lambda step: 1e-2,
            steps=9,
            part_size=4,
        ),
    }


def test_gradients_and_statistics_are_those_of_eager_steps():
    """Asking for gradients moves no running statistics; both kinds of step share moments."""
    seen: dict[str, list[dict[str, np.ndarray]]] = {"eager": [], "graph": []}
    states, losses = {}, {}
    for name, step in _steps().items():
        step.before_update = lambda step=step, name=name: seen[name].append(
            {each: gradient.numpy().copy() for each, gradient in step.named_gradients()}
        )
        batch, losses[name], begin = _batch(28), [], 0
        step.model.train()
        for number, parts in enumerate((2, 2, 1, 2)):
            flow.manual_seed(number)
            end = begin + 4 * parts
            own = {name: array[begin:end] for name, array in batch.items()}
            losses[name].append(float(step.step(own, 1e-2).loss.numpy()))
            begin = end
        states[name] = {k: v.numpy() for k, v in step.evaluated_model().state_dict().items()}
        states[name] |= step.optimizer_arrays()
        weights = {key: value.numpy() for key, value in step.named_weights()}
        assert weights.keys() == dict(step.model.named_parameters()).keys()
        for key, value in weights.items():
            np.testing.assert_array_equal(value, states[name][key], err_msg=key)
    np.testing.assert_allclose(losses["graph"], losses["eager"], rtol=1e-5)
    assert len(seen["graph"]) == 4
    for ours, theirs in zip(seen["graph"], seen["eager"], strict=True):
        assert ours.keys() == theirs.keys()
        assert "frozen" not in ours
        for key, value in ours.items():
            np.testing.assert_allclose(value, theirs[key], rtol=1e-3, atol=1e-6, err_msg=key)
    assert states["graph"].keys() == states["eager"].keys()
    # AdamW divides by the root of a moment that is near 0 in places.
    for key, value in states["graph"].items():
        np.testing.assert_allclose(value, states["eager"][key], rtol=1e-3, atol=1e-5, err_msg=key)
    assert (states["graph"]["frozen"] == 1).all()


def test_gradients_are_there_inside_a_step_only():
    with pytest.raises(RuntimeError, match="before_update"):
        next(_steps()["graph"].named_gradients())


def test_a_graph_takes_equal_parts():
    with pytest.raises(ValueError, match="7 samples for a graph of 2 equal parts"):
        _steps()["graph"].step(_batch(7), 1e-2)


def test_factors_have_to_follow_the_batch():
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = dropout(0.5)

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return x.flatten(1) + self.drop(x.flatten(1).sum(dim=0, keepdim=True))

    task = ImageTask(lambda scores, labels: scores.sum())
    factors = StepFactors(Folded(), task, oneflow_accel.select_device())
    with pytest.raises(RuntimeError, match="for 4 images"):
        factors.draw([_batch()])


def test_models_without_dropout_need_no_factors():
    task = ImageTask(build_loss(None))
    factors = StepFactors(nn.Linear(2, 2), task, oneflow_accel.select_device())
    assert factors.draw([_batch()] * 2) == [[], []]
