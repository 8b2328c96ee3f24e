"""Updates and gradient clipping, eager and nn.Graph, against PyTorch's formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.oneflow_accel.kernels.harness import needs_plugin, random
from tests.tolerances import assert_close

pytestmark = needs_plugin

STEPS = 4
# One element, one vector register and a rest, and more than one thread's share.
SHAPES = [(1,), (7, 5), (3, 40009)]
Array = np.ndarray
Options = Mapping[str, Any]


def sgd_reference(p: Array, gradients: list[Array], options: Options) -> Array:
    beta = options.get("momentum", 0.0)
    velocity = np.zeros_like(p)
    for gradient in gradients:
        g = gradient + options.get("weight_decay", 0.0) * p
        if beta:
            velocity = beta * velocity + (1 - options.get("dampening", 0.0)) * g
            g = g + beta * velocity if options.get("nesterov") else velocity
        p = p + (1 if options.get("maximize") else -1) * options["lr"] * g
    return p


def adam_reference(p: Array, gradients: list[Array], options: Options) -> Array:
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    decay = options.get("weight_decay", 0.0)
    coupled = 0.0 if options["decoupled"] else decay
    first, second, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for step, gradient in enumerate(gradients, start=1):
        g = gradient + coupled * p
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        largest = np.maximum(largest, second)
        correct = options.get("do_bias_correction", True)
        correction1 = 1 - beta1**step if correct else 1.0
        correction2 = 1 - beta2**step if correct else 1.0
        root = np.sqrt((largest if options.get("amsgrad") else second) / correction2)
        direction = first / correction1 / (root + options.get("eps", 1e-8))
        p = p - options["lr"] * (direction + (decay - coupled) * p)
    return p


class Linear(nn.Module):
    """sum(w * x) over all parameters, so that the gradient of each w is its x."""

    def __init__(self, arrays: list[Array]) -> None:
        super().__init__()
        for i, array in enumerate(arrays):
            self.register_parameter(f"weight{i}", nn.Parameter(flow.tensor(array)))

    def forward(self, *inputs: flow.Tensor) -> flow.Tensor:
        # An nn.Graph gives its own tensors for the names.
        sums = [(getattr(self, f"weight{i}") * x).sum() for i, x in enumerate(inputs)]
        return sum(sums[1:], start=sums[0])


def train(
    start: list[Array],
    gradients: list[list[Array]],
    make_optimizer: Callable[[Iterator[nn.Parameter]], flow.optim.Optimizer],
    *,
    graph: bool,
    clip: bool = False,
    configure: Callable[[nn.Graph], None] = lambda graph: None,
) -> list[Array]:
    """The parameters after one optimizer step with each of `gradients`."""
    model = Linear(start)
    optimizer = make_optimizer(model.parameters())

    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)
            configure(self)

        def build(self, *inputs: flow.Tensor) -> flow.Tensor:
            loss = self.model(*inputs)
            loss.backward()
            return loss

    step = Step() if graph else None
    for arrays in gradients:
        inputs = [flow.tensor(array) for array in arrays]
        if step is not None:
            step(*inputs)
            continue
        optimizer.zero_grad()
        model(*inputs).backward()
        if clip:
            optimizer.clip_grad()
        optimizer.step()
    return [weight.numpy() for weight in model.parameters()]


def start_and_gradients(scale: float = 1.0) -> tuple[list[Array], list[list[Array]]]:
    start = [random(*shape) for shape in SHAPES]
    gradients = [
        [scale * random(*shape, seed=step + 1) for shape in SHAPES] for step in range(STEPS)
    ]
    return start, gradients


def assert_trained(
    actual: list[Array],
    start: list[Array],
    gradients: list[list[Array]],
    reference: Any,
    options: Options,
) -> None:
    for i, parameters in enumerate(actual):
        own = [np.asarray(arrays[i], np.float64) for arrays in gradients]
        expected = reference(np.asarray(start[i], np.float64), own, options)
        assert_close(parameters, expected, reduced=STEPS)
        assert not np.array_equal(parameters, start[i])


@pytest.mark.filterwarnings("ignore:Only Momentum")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.3},
        {"momentum": 0.9, "maximize": True},
    ],
    ids=str,
)
def test_sgd(options: Options, graph: bool) -> None:
    options = {"lr": 0.1, **options}
    start, gradients = start_and_gradients()
    actual = train(start, gradients, lambda p: flow.optim.SGD(p, **options), graph=graph)
    assert_trained(actual, start, gradients, sgd_reference, options)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"weight_decay": 0.1, "amsgrad": True},
        {"do_bias_correction": False, "eps": 1e-3},
    ],
    ids=str,
)
def test_adam(options: Options, decoupled: bool, graph: bool) -> None:
    options = {"lr": 0.01, "eps": 1e-6, **options}
    optimizer = flow.optim.AdamW if decoupled else flow.optim.Adam
    if not decoupled:
        options.setdefault("do_bias_correction", True)
    start, gradients = start_and_gradients()
    # Gradients shrink, so that AMSGrad's largest second moment is not the last one.
    gradients = [
        [array / (step + 1) ** 3 for array in arrays] for step, arrays in enumerate(gradients)
    ]
    actual = train(start, gradients, lambda p: optimizer(p, **options), graph=graph)
    assert_trained(actual, start, gradients, adam_reference, {**options, "decoupled": decoupled})


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("max_norm", [3.0, 1e6])
def test_optimizer_that_clips(max_norm: float, graph: bool, fuse: bool) -> None:
    # Fusing passes the clipping factor to the update (scale_by_tensor) and its weight decay (l2).
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    clipping = {"clip_grad_max_norm": max_norm, "clip_grad_norm_type": 2.0}
    start, gradients = start_and_gradients()
    actual = train(
        start,
        gradients,
        lambda p: flow.optim.SGD([{"params": list(p), **clipping}], **options),
        graph=graph,
        clip=True,
        configure=lambda graph: graph.config.allow_fuse_model_update_ops(fuse),
    )
    clipped = []
    for arrays in gradients:
        norm = np.sqrt(sum(np.sum(np.asarray(array, np.float64) ** 2) for array in arrays))
        clipped.append([array * min(1.0, max_norm / (norm + 1e-6)) for array in arrays])
    assert_trained(actual, start, clipped, sgd_reference, options)


@pytest.mark.parametrize("optimizer", [flow.optim.SGD, flow.optim.AdamW])
def test_a_step_with_infinite_gradients_is_skipped(optimizer: Any) -> None:
    start, gradients = start_and_gradients()
    gradients[1][0][...] = np.inf

    def scale(graph: nn.Graph) -> None:
        graph.set_grad_scaler(flow.amp.GradScaler(init_scale=16.0, growth_interval=1000))

    actual = train(start, gradients, lambda p: optimizer(p, lr=0.1), graph=True, configure=scale)
    without = [arrays for step, arrays in enumerate(gradients) if step != 1]
    if optimizer is flow.optim.SGD:
        assert_trained(actual, start, without, sgd_reference, {"lr": 0.1})
    else:
        assert all(np.isfinite(parameters).all() for parameters in actual)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm(max_norm: float, norm_type: float) -> None:
    arrays = [random(*shape) for shape in SHAPES]
    parameters = [nn.Parameter(flow.tensor(array)) for array in arrays]
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.grad = flow.tensor(array)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    everything = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
    expected = np.linalg.norm(everything, norm_type)
    assert_close(norm.numpy(), expected, reduced=everything.size)
    for parameter, array in zip(parameters, arrays, strict=True):
        factor = min(1.0, max_norm / (expected + 1e-6))
        assert_close(parameter.grad.numpy(), array * factor, reduced=everything.size)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_clip_grad_norm_that_is_not_finite(value: float) -> None:
    array = random(7, 5)
    array[3, 2] = value
    parameter = nn.Parameter(flow.tensor(array))
    parameter.grad = flow.tensor(array)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    np.testing.assert_equal(nn.utils.clip_grad_norm_(parameter, 1.0).numpy(), np.float32(value))


def test_norm_of_values_whose_squares_overflow() -> None:
    x = np.full(100_003, 1e30, np.float32)
    assert_close(
        flow.linalg.vector_norm(flow.tensor(x)).numpy() / 1e30, np.sqrt(100_003.0), reduced=1
    )
