"""Operators called through the plug-in: arguments, errors, gradients, and a process without it."""

from __future__ import annotations

from typing import Any

from oneflow_accel import settings
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import operators
from oneflow_accel.kernels.operators import Operator, differentiable

import numpy as np
import oneflow as flow
import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import (
    gradients,
    needs_plugin,
    random,
)
from tests.tolerances import assert_close

pytestmark = needs_plugin

# Operators that OneFlow has too, so that its own functions say what is right.
RELU = Operator("relu", inputs=("x",), outputs=("y",))
RELU_GRAD = Operator("relu_grad", inputs=("dy", "y"), outputs=("dx",))
CONV = Operator(
    "conv2d",
    inputs=("in", "weight", "bias"),
    outputs=("out",),
    optional=("bias",),
    attributes={
        "filters": "int32",
        "padding_before": "list_int32",
        "data_format": "string",
        "kernel_size": "list_int32",
        "strides": "list_int32",
        "dilation_rate": "list_int32",
        "groups": "int32",
    },
)
CONV_ATTRIBUTES: dict[str, Any] = {
    "filters": 4,
    "padding_before": [1, 0],
    "data_format": "channels_first",
    "kernel_size": [3, 3],
    "strides": [2, 1],
    "dilation_rate": [1, 1],
    "groups": 1,
}
X = flow.tensor(random(2, 3))


def _conv(**attributes: Any) -> Any:
    x, weight = flow.tensor(random(2, 3, 8, 9)), flow.tensor(random(4, 3, 3, 3))
    return CONV(x, weight, None, **{**CONV_ATTRIBUTES, **attributes})


@pytest.mark.parametrize("bias", [None, random(4)])
def test_attributes_and_an_optional_input(bias: np.ndarray | None) -> None:
    x, weight = flow.tensor(random(2, 3, 8, 9)), flow.tensor(random(4, 3, 3, 3))
    bias = None if bias is None else flow.tensor(bias)
    (y,) = CONV(x, weight, bias, **CONV_ATTRIBUTES)
    # OneFlow adds the bias after the product, which is another rounding.
    expected = flow._C.conv2d(x, weight, bias, stride=[2, 1], padding=[1, 0])
    assert_close(y.numpy(), expected.numpy(), reduced=27)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RELU(3), "x is not a tensor but int"),
        (lambda: RELU(None), "x is not a tensor but NoneType"),
        (lambda: RELU(X, X), r"takes 1 tensors \(x\), not 2"),
        (lambda: RELU(X, slope=0.1), r"takes the attributes \[\], not \['slope'\]"),
        (lambda: _conv(groups=1.5), "groups must be int32, not 1.5"),
        (lambda: _conv(groups=True), "groups must be int32, not True"),
        (lambda: _conv(strides=[1, "1"]), "strides must be int32, not '1'"),
        (lambda: _conv(data_format=1), "data_format must be string, not 1"),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_declaration_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="int8"):
        Operator("relu", inputs=("x",), outputs=("y",), attributes={"a": "int8"})
    with pytest.raises(ValueError, match="optional"):
        Operator("relu", inputs=("x",), outputs=("y",), optional=("z",))


def test_an_operator_that_the_plugin_lacks() -> None:
    with pytest.raises(UserError, match="has no operator oneflow_accel_nothing: build it again"):
        Operator("oneflow_accel_nothing", inputs=("x",), outputs=("y",))(X)


def test_the_error_of_oneflow_is_raised() -> None:
    with pytest.raises(RuntimeError, match=r"\(2,3\) vs \(4,3,3,3\)"):
        CONV(flow.tensor(random(2, 3, 8, 9)), X, None, **CONV_ATTRIBUTES)


@pytest.mark.parametrize(
    ("expression", "inputs"),
    [
        (object(), (X,)),
        (RELU._build((True,), ()), [X]),
        (RELU._build((True,), ()), None),
        (RELU._build((True,), ()), (np.zeros(3),)),
    ],
)
def test_wrong_objects_do_not_end_the_process(expression: Any, inputs: Any) -> None:
    with pytest.raises(TypeError):
        operators._runner()(expression, inputs)


# A gradient that is wrong on purpose: only the function's own backward gives it.
@differentiable("Tripled", lambda kept, dy: (3.0 * RELU_GRAD(dy, *kept)[0],))
def tripled(x: flow.Tensor) -> Any:
    (y,) = RELU(x)
    return y, (y,)


def test_gradient() -> None:
    x, dy = random(5, 7), random(5, 7, seed=1)
    y, (dx,) = gradients(tripled, [x], dy)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    assert_close(dx, 3.0 * np.where(x > 0, dy, 0))


def test_without_the_plugin() -> None:
    code = """
import numpy as np
import oneflow_accel, oneflow as flow
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry
from oneflow_accel.kernels.attention import packed_attention
from oneflow_accel.kernels.operators import Operator
try:
    Operator("relu", inputs=("x",), outputs=("y",))(flow.ones(3))
except UserError as error:
    print("operator:", error)
print(registry.explain("packed_attention", "cpu", flow.ones(1, 2, 3, 1, 4)))
value = flow.tensor(np.arange(24, dtype=np.float32).reshape(1, 2, 12))
print("first:", packed_attention(value, 1, causal=True)[0, 0].numpy().tolist())
"""
    result = run_process(["-c", code], env={settings.PLUGIN.name: "off"})
    lines = result.stdout.splitlines()
    assert "operator: relu cannot run: there is no CPU plug-in: switched off by " in result.stdout
    assert "CHOSEN: chunked_packed_attention" in result.stdout
    # The first position sees itself alone: its own value.
    assert "first: [8.0, 9.0, 10.0, 11.0]" in lines, result.stdout
