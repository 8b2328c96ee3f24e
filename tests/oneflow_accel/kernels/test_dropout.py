"""dropout: the masks of OneFlow's own generator, drawn by all threads."""

from __future__ import annotations

import json

from oneflow_accel import settings

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import (
    needs_plugin,
    random,
)
from tests.oneflow_accel.kernels.mersenne import Masks
from tests.tolerances import assert_close

pytestmark = needs_plugin

# What an nn.Graph's operators are seeded with, whatever manual_seed was given.
GRAPH_SEED = 67280421310721
# One word, parts of a block of 624 words and of a chunk of 16 blocks, several chunks.
SHAPES = [(), (1,), (0, 3), (623,), (624,), (5, 7, 11), (16 * 624,), (16 * 624 + 1,), (100003,)]


def dropped(x: np.ndarray, mask: np.ndarray, rate: float) -> np.ndarray:
    """y = x / (1 - rate) where the mask is true, else 0, as the kernel rounds it."""
    scale = np.float32(1) / (np.float32(1) - np.float32(rate)) if rate < 1 else np.float32(0)
    return np.asarray(x * (mask * scale).astype(np.float32))


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_one_call_after_another_draws_on(rate: float) -> None:
    masks = Masks(17)
    flow.manual_seed(17)
    for shape in SHAPES:
        x = random(*shape)
        y = nn.functional.dropout(flow.tensor(x), rate)
        np.testing.assert_array_equal(y.numpy(), dropped(x, masks.dropout(shape, rate), rate))


@pytest.mark.parametrize("rate", [1e-9, 0.3, np.nextafter(np.float32(1), 0)])
def test_thresholds(rate: float) -> None:
    """Rates at which a word's neighbor may fall on the other side."""
    shape = (300000,)
    flow.manual_seed(3)
    y = nn.functional.dropout(flow.ones(*shape), float(rate))
    np.testing.assert_array_equal(y.numpy() != 0, Masks(3).dropout(shape, rate))


def test_output_and_gradient() -> None:
    x, dy = random(8, 197, 64), random(8, 197, 64, seed=1)
    flow.manual_seed(5)
    tensor = flow.tensor(x, requires_grad=True)
    y = nn.Dropout(0.1)(tensor)
    y.backward(flow.tensor(dy))
    mask = Masks(5).dropout(x.shape, 0.1)
    np.testing.assert_array_equal(y.numpy(), dropped(x, mask, 0.1))
    np.testing.assert_allclose(tensor.grad.numpy(), dropped(dy, mask, 0.1), rtol=1e-6)


def test_bfloat16() -> None:
    """The same masks, and values that are rounded once."""
    x, addend, dy = (flow.tensor(random(70, 701, seed=i)).bfloat16() for i in range(3))
    tensor = x.detach().requires_grad_()
    flow.manual_seed(5)
    y = nn.functional.dropout(tensor, 0.1)
    y.backward(dy)
    mask = Masks(5).dropout(x.shape, 0.1)

    def expected(values: flow.Tensor) -> np.ndarray:
        exact = flow.tensor(dropped(values.float().numpy(), mask, 0.1))
        return np.asarray(exact.bfloat16().float().numpy())

    np.testing.assert_array_equal(y.float().numpy(), expected(x))
    np.testing.assert_array_equal(tensor.grad.float().numpy(), expected(dy))
    flow.manual_seed(5)
    y = flow._C.dropout(x, 0.1, addend=addend)
    exact = dropped(x.float().numpy(), mask, 0.1) + addend.float().numpy()
    assert_close(y.float().numpy(), exact, dtype="bfloat16")


def test_addend() -> None:
    x, addend = random(70, 700), random(70, 700, seed=1)
    flow.manual_seed(5)
    y = flow._C.dropout(flow.tensor(x), 0.5, addend=flow.tensor(addend))
    mask = Masks(5).dropout(x.shape, 0.5)
    np.testing.assert_array_equal(y.numpy(), dropped(x, mask, 0.5) + addend)


def test_generator_state_moves_on() -> None:
    """A generator of the caller's own ends in the state that NumPy's ends in."""
    generator = flow.Generator("cpu")
    generator.manual_seed(9)
    masks = Masks(9)
    x = flow.ones(50, 700)
    flow._C.dropout(x, 0.5, generator=generator)
    masks.dropout((50, 700), 0.5)
    words = generator.get_state().numpy().view(np.int64)[:624]
    np.testing.assert_array_equal(words, masks.engine.get_state()[1])


def test_graph_draws_on_from_its_own_seed() -> None:
    class Graph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)

        def build(self, x: flow.Tensor) -> flow.Tensor:
            return self.dropout(x)

    x = random(30, 700)
    masks, graph = Masks(GRAPH_SEED), Graph()
    for _ in range(3):
        expected = dropped(x, masks.dropout(x.shape, 0.3), 0.3)
        np.testing.assert_array_equal(graph(flow.tensor(x)).numpy(), expected)


_DIGESTS = """
import hashlib, json
import oneflow_accel
import oneflow as flow

flow.manual_seed(11)
digests = []
for n in (1, 1000, 100003, 5):
    for tensor in (
        flow._C.dropout(flow.ones(n), 0.1),
        flow._C.dropout(flow.ones(n), 0.7, addend=flow.ones(n)),
        flow.default_generator.get_state(),
        flow.rand(3),
    ):
        digests.append(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
print("digests", json.dumps(digests))
"""


def _digests(plugin_switch: str, threads: int) -> list[str]:
    environment = {settings.PLUGIN.name: plugin_switch, settings.THREADS.name: str(threads)}
    result = run_process(["-c", _DIGESTS], env=environment)
    assert result.returncode == 0, result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("digests "))
    digests: list[str] = json.loads(line.removeprefix("digests "))
    return digests


def test_stock_kernels_and_any_number_of_threads_give_the_same() -> None:
    stock = _digests("off", 1)
    assert len(stock) == 16
    assert _digests("on", 3) == stock
