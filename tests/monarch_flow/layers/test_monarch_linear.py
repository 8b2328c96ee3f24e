"""MonarchLinear: function, gradients, shapes, start values, state."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import MonarchLinear, monarch_shapes
from tests.monarch_flow.monarch_reference import dense_by_slots, monarch_gradients
from tests.tolerances import assert_close

# in, out: blkdiag1, blkdiag2, weights, weights over dense (spec, table of section 1.3; nblocks 4).
TABLE = [
    (768, 2304, (4, 192, 192), (4, 576, 192), 589_824, 0.3333),
    (2304, 768, (4, 192, 576), (4, 192, 192), 589_824, 0.3333),
    (768, 768, (4, 192, 192), (4, 192, 192), 294_912, 0.5),
    (10, 7, (4, 2, 3), (4, 2, 2), 40, 0.5714),
    (7, 10, (4, 2, 2), (4, 3, 2), 40, 0.5714),
    # Extended widths are equal, which is the second case.
    (9, 10, (4, 3, 3), (4, 3, 3), 72, 0.8),
]


def set_factors(layer: MonarchLinear, blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> None:
    with flow.no_grad():
        layer.blkdiag1.copy_(flow.tensor(blkdiag1, dtype=layer.blkdiag1.dtype))
        layer.blkdiag2.copy_(flow.tensor(blkdiag2, dtype=layer.blkdiag2.dtype))


def counted(shape: tuple[int, ...]) -> np.ndarray:
    """1, 2, 3, ... row by row."""
    return np.arange(1.0, math.prod(shape) + 1).reshape(shape)


def random_widths(number: int) -> list[tuple[int, int, int]]:
    """(in, out, nblocks), most of which nblocks does not divide."""
    rng = np.random.default_rng(7)
    return [tuple(map(int, rng.integers(1, (40, 40, 9)))) for _ in range(number)]


@pytest.mark.parametrize(("wide", "narrow", "first", "second", "weights", "saving"), TABLE)
def test_shapes_and_counts(
    wide: int, narrow: int, first: tuple, second: tuple, weights: int, saving: float
) -> None:
    assert monarch_shapes(wide, narrow, 4) == (first, second)
    layer = MonarchLinear(wide, narrow)
    assert tuple(layer.blkdiag1.shape) == first
    assert tuple(layer.blkdiag2.shape) == second
    assert layer.macs_per_row() == weights
    assert round(layer.saving, 4) == saving
    assert sum(p.numel() for p in layer.parameters()) == weights + narrow
    assert (layer.in_features_extended, layer.out_features_extended) == (
        first[0] * first[2],
        second[0] * second[1],
    )


def test_golden_vector_of_a_padded_layer() -> None:
    layer = MonarchLinear(3, 5, bias=False, nblocks=2)
    assert (tuple(layer.blkdiag1.shape), tuple(layer.blkdiag2.shape)) == ((2, 2, 2), (2, 3, 2))
    set_factors(layer, counted((2, 2, 2)), counted((2, 3, 2)))
    x = flow.tensor([1.0, 2.0, 3.0])
    assert layer(x).numpy().tolist() == [35, 245, 75, 309, 115]


def test_random_layers_are_their_matrix() -> None:
    """100 shapes in float64 against the matrix that the definition gives entry by entry."""
    for in_features, out_features, nblocks in random_widths(100):
        layer = MonarchLinear(in_features, out_features, nblocks=nblocks, dtype=flow.float64)
        matrix = dense_by_slots(layer.blkdiag1.numpy(), layer.blkdiag2.numpy())
        matrix = matrix[:out_features, :in_features]
        x = np.random.default_rng(in_features).standard_normal((2, 3, in_features))
        expected = x @ matrix.T + layer.bias.numpy()
        assert_close(layer(flow.tensor(x)).numpy(), expected, dtype="float64", reduced=40)
        assert_close(layer.dense().numpy(), matrix, dtype="float64", reduced=40)


@pytest.mark.parametrize("sizes", [(96, 64, 4), (64, 192, 4), (10, 7, 4), (5, 3, 8), (33, 50, 6)])
@pytest.mark.parametrize("dtype", [flow.float32, flow.float64])
def test_gradients(sizes: tuple[int, int, int], dtype: flow.dtype) -> None:
    in_features, out_features, nblocks = sizes
    layer = MonarchLinear(in_features, out_features, nblocks=nblocks, dtype=dtype)
    rng = np.random.default_rng(3)
    x = flow.tensor(rng.standard_normal((6, in_features)), dtype=dtype, requires_grad=True)
    y_grad = rng.standard_normal((6, out_features))
    layer(x).backward(flow.tensor(y_grad, dtype=dtype))

    padded = np.pad(
        x.numpy().astype(float), ((0, 0), (0, layer.in_features_extended - in_features))
    )
    padded_grad = np.pad(y_grad, ((0, 0), (0, layer.out_features_extended - out_features)))
    factors = [layer.blkdiag1.numpy().astype(float), layer.blkdiag2.numpy().astype(float)]
    expected = monarch_gradients(padded, *factors, padded_grad)
    name = str(dtype).removeprefix("oneflow.")
    assert_close(x.grad.numpy(), expected[0][:, :in_features], dtype=name, reduced=200)
    assert_close(layer.blkdiag1.grad.numpy(), expected[1], dtype=name, reduced=200)
    assert_close(layer.blkdiag2.grad.numpy(), expected[2], dtype=name, reduced=200)
    assert_close(layer.bias.grad.numpy(), y_grad.sum(axis=0), dtype=name, reduced=6)


def test_any_number_of_axes() -> None:
    layer = MonarchLinear(10, 7)
    x = flow.randn(2, 3, 4, 10)
    y = layer(x).numpy()
    assert y.shape == (2, 3, 4, 7)
    assert_close(layer(x.reshape(24, 10)).numpy(), y.reshape(24, 7), reduced=10)
    assert_close(layer(x[1, 2, 3]).numpy(), y[1, 2, 3], reduced=10)


def test_no_rows() -> None:
    if not plugin.state().loaded:
        pytest.skip("OneFlow's own matrix product aborts the process on no rows")
    assert MonarchLinear(10, 7)(flow.zeros(0, 10)).shape == (0, 7)


def test_gradient_flows_through_dense() -> None:
    layer = MonarchLinear(6, 9, nblocks=3, dtype=flow.float64)
    x = flow.randn(4, 6, dtype=flow.float64)
    layer(x).sum().backward()
    expected = layer.blkdiag1.grad.numpy()
    layer.blkdiag1.grad = None
    flow.matmul(x, layer.dense().transpose(0, 1)).sum().backward()
    assert_close(layer.blkdiag1.grad.numpy(), expected, dtype="float64", reduced=40)


def test_order_of_parameters_and_keys_of_the_state() -> None:
    layer = MonarchLinear(768, 2304)
    assert [name for name, _ in layer.named_parameters()] == ["bias", "blkdiag1", "blkdiag2"]
    assert list(MonarchLinear(8, 8, bias=False).state_dict()) == ["blkdiag1", "blkdiag2"]
    other = MonarchLinear(768, 2304)
    other.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other.dense().numpy(), layer.dense().numpy())


@pytest.mark.parametrize(
    ("sizes", "stds"),
    [((768, 2304), (0.0417, 0.0417, 0.0120)), ((2304, 768), (0.0241, 0.0417, 0.0208))],
)
def test_start_values(sizes: tuple[int, int], stds: tuple[float, float, float]) -> None:
    """Bounds 1/sqrt(last dimension), the bias's 1/sqrt(out); standard deviations of the spec."""
    flow.manual_seed(0)
    layer = MonarchLinear(*sizes)
    fans = layer.blkdiag1.shape[-1], layer.blkdiag2.shape[-1], sizes[1]
    for parameter, fan, std in zip(
        (layer.blkdiag1, layer.blkdiag2, layer.bias), fans, stds, strict=True
    ):
        values, bound = parameter.numpy(), 1 / math.sqrt(fan)
        assert 0.99 * bound < np.abs(values).max() <= bound * (1 + 1e-6)
        assert abs(values.mean()) < 4 * bound / math.sqrt(3 * values.size)
        np.testing.assert_allclose(values.std(), std, rtol=0.04)


def test_the_rule_of_a_model_leaves_it_alone() -> None:
    layer = MonarchLinear(8, 12)
    before = {name: value.numpy().copy() for name, value in layer.state_dict().items()}
    layer.reset_dense_init(nn.init.zeros_)
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name])


def test_dtype_reaches_every_parameter() -> None:
    """Upstream gives it to the bias alone."""
    layer = MonarchLinear(8, 12, dtype=flow.float64)
    assert {p.dtype for p in layer.parameters()} == {flow.float64}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_features": 8, "out_features": 8, "nblocks": 0}, "nblocks is 0"),
        ({"in_features": 8, "out_features": 8, "nblocks": 2.0}, "nblocks is 2.0"),
        ({"in_features": 0, "out_features": 8}, "in_features is 0"),
        ({"in_features": 8, "out_features": True}, "out_features is True"),
    ],
)
def test_wrong_sizes(arguments: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        MonarchLinear(**arguments)


@pytest.mark.parametrize("shape", [(2, 9), (7,), (2, 11), ()])
def test_input_of_another_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., 10\)"):
        MonarchLinear(10, 7)(flow.zeros(*shape) if shape else flow.tensor(1.0))
