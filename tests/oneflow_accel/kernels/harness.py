"""What the tests of the plug-in's kernels share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from oneflow_accel import settings
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.launch import run_process

needs_plugin = pytest.mark.skipif(
    not plugin.state().loaded, reason=f"no CPU plug-in: {plugin.state().reason}"
)

Function = Callable[..., flow.Tensor]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


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


def _training_step(
    fn: Function, arrays: Sequence[np.ndarray], weight: np.ndarray, graph: bool
) -> list[np.ndarray]:
    names = [f"input{i}" for i in range(len(arrays))]

    class Operation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in zip(names, arrays, strict=True):
                self.register_parameter(name, nn.Parameter(flow.tensor(array)))

        def forward(self) -> flow.Tensor:
            return fn(*(getattr(self, name) * 1.0 for name in names))

    module = Operation()
    optimizer = flow.optim.SGD(module.parameters(), lr=1.0)
    weight_tensor = flow.tensor(weight)

    class Step(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.add_optimizer(optimizer)

        def build(self) -> flow.Tensor:
            y = self.module()
            (y * weight_tensor).sum().backward()
            return y

    if graph:
        y = Step()()
    else:
        y = module()
        (y * weight_tensor).sum().backward()
        optimizer.step()
    return [y.numpy(), *(parameter.numpy() for parameter in module.parameters())]


def assert_eager_equals_graph(
    fn: Function, arrays: Sequence[np.ndarray], weight: np.ndarray
) -> None:
    """Output and gradients are the same to the last bit in eager mode and in an nn.Graph."""
    eager = _training_step(fn, arrays, weight, graph=False)
    graph = _training_step(fn, arrays, weight, graph=True)
    for one, other in zip(eager, graph, strict=True):
        np.testing.assert_array_equal(one, other)


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


def assert_same_for_any_number_of_threads(code: str, count: int = 1) -> None:
    """What `code` prints in `count` lines that begin with "result ", a digest each, is the same
    whatever the number of threads of each kernel."""
    results = set()
    for threads in ("1", "2", "3"):
        output = run_process(["-c", code], env={settings.THREADS.name: threads}).stdout
        results |= {line for line in output.splitlines() if line.startswith("result ")}
    assert len(results) == count, results


_FORK = """
import os, sys
import oneflow_accel
import oneflow as flow
from oneflow import nn

def run():
    flow.manual_seed(1)
    {body}

expected = run()
child = os.fork()
if child == 0:
    same = (run() == expected).all()
    sys.stdout.flush()
    os._exit(0 if same else 7)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


def assert_same_after_fork(body: str) -> None:
    """`body`, which ends in `return <ndarray>`, gives the same in a process forked after a run."""
    code = _FORK.format(body=body.strip().replace("\n", "\n    "))
    result = run_process(["-c", code], timeout=60, env={settings.THREADS.name: "2"})
    assert "child 0" in result.stdout, result.stdout
