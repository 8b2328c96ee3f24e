"""What the tests of the plug-in's kernels share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

needs_plugin = pytest.mark.skipif(
    not plugin.state().loaded, reason=f"no CPU plug-in: {plugin.state().reason}"
)

Function = Callable[..., flow.Tensor]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Forward(nn.Graph):
    """A module's output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def build(self, x: flow.Tensor) -> flow.Tensor:
        return self.module(x)


@contextmanager
def emulated_tiles() -> Iterator[None]:
    """In it, what an operation computes before its result is read is by tiles of bfloat16."""
    library = ctypes.CDLL(str(plugin.state().path))
    library.oneflow_accel_emulate_tiles(1)
    try:
        yield
    finally:
        library.oneflow_accel_emulate_tiles(0)


def as_array(tensor: flow.Tensor) -> np.ndarray:
    """NumPy has no bfloat16: float32 of it."""
    return (tensor.to(flow.float32) if tensor.dtype == flow.bfloat16 else tensor).numpy()


def as_held(array: np.ndarray, dtype: str) -> np.ndarray:
    """A floating-point array as tensors of `dtype` can hold it: rounded to bfloat16."""
    return as_array(flow.tensor(array).to(flow.bfloat16)) if dtype == "bfloat16" else array


def gradients(
    fn: Function, arrays: Sequence[np.ndarray], weight: np.ndarray, dtypes: Sequence[str] = ()
) -> tuple[np.ndarray, list[np.ndarray]]:
    """y = fn(*arrays) and the gradients of sum(y * weight) by each array, run eagerly, on tensors
    of `dtypes` ("float32", "bfloat16") or else of the arrays' own."""
    tensors = [flow.tensor(array) for array in arrays]
    if dtypes:
        tensors = [t.to(getattr(flow, d)) for t, d in zip(tensors, dtypes, strict=True)]
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    y = fn(*tensors)
    y.backward(flow.tensor(weight).to(y.dtype))
    for tensor in tensors:
        assert tensor.grad.dtype == tensor.dtype
    return as_array(y), [as_array(tensor.grad) for tensor in tensors]


def assert_same_in_threads(fn: Callable[[], np.ndarray], threads: int = 4, calls: int = 8) -> None:
    """Several Python threads that call fn() at once all get what one alone gets."""
    expected = fn()
    results: list[np.ndarray] = []

    def work() -> None:
        for _ in range(calls):
            results.append(fn())

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == threads * calls
    for result in results:
        np.testing.assert_array_equal(result, expected)
