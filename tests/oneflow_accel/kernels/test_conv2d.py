"""Convolutions beyond their records: a second gradient, worker threads, errors."""

from __future__ import annotations

import itertools

from oneflow_accel import settings

import numpy as np
import oneflow as flow
import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin, random
from tests.oneflow_accel.kernels.records.conv2d import CASES, convolve
from tests.oneflow_accel.kernels.reference_conv import (
    FORMATS,
    conv_gradients,
    from_format,
    to_format,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin


def data(name: str, data_format: str) -> list[np.ndarray]:
    """x, weight and dy, in this format."""
    conv = CASES[name]
    shapes = (conv.x_shape, conv.weight_shape, conv.y_shape)
    return [to_format(random(*shape, seed=i), data_format) for i, shape in enumerate(shapes)]


def test_bias_as_an_input_of_the_operator() -> None:
    """oneflow gives conv2d its bias only if a variable says so before the first convolution."""
    environment = {"ONEFLOW_KERNEL_ENABLE_FUSED_CONV_BIAS": "1", settings.THREADS.name: "2"}
    worker = ["-m", "tests.oneflow_accel.kernels.records_worker", "check", "conv2d"]
    result = run_process(worker, env=environment)
    assert "all as in the records" in result.stdout, result.stdout


@pytest.mark.parametrize("data_format", FORMATS)
def test_second_order_gradient(data_format: str) -> None:
    """d(sum(dx * v))/dw, which runs the operators in other roles: dx is linear in w."""
    conv = CASES["3x3-strided"]
    v = random(*conv.x_shape, seed=4)
    arrays = data("3x3-strided", data_format)
    tensors = [flow.tensor(array, requires_grad=True) for array in arrays]
    y = convolve(*tensors[:2], conv=conv, data_format=data_format)
    (dx,) = flow.autograd.grad([y], [tensors[0]], [tensors[2]], create_graph=True)
    dx.backward(flow.tensor(to_format(v, data_format)))
    # sum(dx * v) = sum(conv(v, w) * dy)
    _, weight, dy = (from_format(array, data_format) for array in arrays)
    _, dw, _ = conv_gradients(conv, v, weight, dy)
    actual = from_format(tensors[1].grad.numpy(), data_format)
    assert_close(actual, dw, reduced=conv.terms["dw"])


def test_kernels_on_several_worker_threads() -> None:
    """Kernels that run at the same time have primitives and scratch memory of their own.

    They are queued from one Python thread: oneflow 0.9.0 deadlocks if several use worker threads.
    """
    work = list(itertools.product(["3x3", "3x3-wide", "stem", "depthwise"], FORMATS))
    workers = {key: flow.asyncs.thread(flow.asyncs.Thread()) for key in work}

    def queue(name: str, data_format: str) -> list[flow.Tensor]:
        x, weight, dy = map(flow.tensor, data(name, data_format))
        x.requires_grad = weight.requires_grad = True
        y = convolve(x, weight, conv=CASES[name], data_format=data_format)
        return [y, *flow.autograd.grad([y], [x, weight], [dy])]

    def flat(tensors: list[flow.Tensor]) -> np.ndarray:
        return np.concatenate([tensor.numpy().ravel() for tensor in tensors])

    alone = {key: flat(queue(*key)) for key in work}
    queued = []
    for _ in range(8):
        for key in work:
            with workers[key]:
                queued.append((key, queue(*key)))
    for key, tensors in queued:
        with workers[key]:
            np.testing.assert_array_equal(flat(tensors), alone[key])


def test_wrong_shapes_are_python_errors() -> None:
    """As oneflow's, though the plug-in's shape rule for filter gradients replaces one of them."""
    x, weight = flow.randn(1, 6, 5, 5), flow.randn(4, 5, 3, 3)
    with pytest.raises(RuntimeError, match="weight"):
        flow._C.conv2d(x, weight, None)
