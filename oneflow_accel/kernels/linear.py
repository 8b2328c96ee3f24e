"""Linear layers, with what follows them: "linear", "bias_mask_scale" and "decoder_layer"."""

from __future__ import annotations

from typing import Any

from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.operators import Operator, gradient_reasons, needs_gradient
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    on_cards,
    register_operation,
)

import oneflow as flow

# flow._C.fused_matmul_bias runs this operator of OneFlow's on CUDA devices only. Its gradient
# leaves the addend out.
_operator = Operator(
    "fused_matmul_bias",
    ("x", "weight", "bias", "_add_to_output"),
    ("out",),
    optional=("_add_to_output",),
)


def _reference(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    y = flow._C.matmul(x, weight, transpose_b=True) + bias
    return y if addend is None else addend + y


linear = register_operation(
    "linear",
    reference=_reference,
    doc="x weight^T + bias (+ addend): x (..., in), weight (out, in), bias (out,), "
    "addend (..., out) to (..., out)",
    lacks={MluBackend.name: "oneflow_mlu has no fused_matmul_bias: a product, then sums"},
)


def _too_few_dimensions(x: flow.Tensor, *_: flow.Tensor | None) -> list[str]:
    return [] if x.ndim >= 2 else [f"x has {x.ndim} dimensions, not 2 or more"]


@cpu_implementation("linear", _operator, not_supported_reasons=_too_few_dimensions)
def onednn(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    if needs_gradient(addend):
        return addend + _operator(x, weight, bias, None)[0]
    (y,) = _operator(x, weight, bias, addend)
    return y


@implementation(
    "linear",
    backend=CudaBackend.name,
    not_supported_reasons=_too_few_dimensions,
    never_run=True,
)
def cublas_lt(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, addend: flow.Tensor | None = None
) -> flow.Tensor:
    """OneFlow's own operator, whose epilogue adds the bias."""
    if needs_gradient(addend):
        return addend + flow._C.fused_matmul_bias(x, weight, bias)
    return flow._C.fused_matmul_bias(x, weight, bias, addend)


# Dropout with a mask that the caller drew; OneFlow's own function for this operator draws it.
_bias = Operator(
    "fused_bias_add_mask_scale",
    inputs=("a", "b", "mask"),
    outputs=("out",),
    attributes={"axis": "int32", "scale": "float"},
)


def _bias_reference(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    return (x + bias) * (keep.to(x.dtype) * scale)


bias_mask_scale = register_operation(
    "bias_mask_scale",
    reference=_bias_reference,
    doc="(x + bias) * scale where keep is true, else 0: x and keep (..., n), bias (n,)",
    lacks={MluBackend.name: "oneflow_mlu has no fused_* operator: a sum and a product"},
)


# OneFlow has a CUDA kernel too; the plug-in is what calls it with a given mask.
@implementation(
    "bias_mask_scale",
    backend=CudaBackend.name,
    missing_reasons=_bias.missing_reasons,
    never_run=True,
)
@cpu_implementation("bias_mask_scale", _bias)
def fused_bias_mask_scale(
    x: flow.Tensor, bias: flow.Tensor, keep: flow.Tensor, scale: float
) -> flow.Tensor:
    """One pass over x."""
    return _bias(x, bias, keep, axis=x.ndim - 1, scale=scale)[0]


# A GPT-2 block on one more token of each sequence: generating text token by token, an operator of
# its own for each product, norm and sum costs more processor time than all but the products, which
# are bound by memory.
Layer = tuple[flow.Tensor, flow.Tensor, flow.Tensor]

_layer_operator = Operator(
    "oneflow_accel_decoder_layer",
    inputs=(
        *("x", "keys", "values"),
        *("input_norm_weight", "input_norm_bias", "qkv_weight", "qkv_bias"),
        *("dense_weight", "dense_bias", "post_norm_weight", "post_norm_bias"),
        *("inner_weight", "inner_bias", "outer_weight", "outer_bias"),
    ),
    outputs=("y", "new_keys", "new_values"),
    attributes={"scale": "double", "epsilon": "double", "tanh": "bool"},
)


def _norm(x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, epsilon: float) -> flow.Tensor:
    return flow.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon)


def _layer_reference(
    x: flow.Tensor,
    keys: flow.Tensor,
    values: flow.Tensor,
    *weights: flow.Tensor,
    scale: float,
    epsilon: float,
    tanh: bool,
) -> Layer:
    input_norm, qkv, dense, post_norm, inner, outer = zip(weights[::2], weights[1::2], strict=True)
    batch, heads, _, size = keys.shape
    mixed = linear(_norm(x, *input_norm, epsilon), *qkv).reshape(batch, heads, 1, 3 * size)
    query, key, value = flow._C.chunk(mixed, 3, 3)
    keys, values = flow._C.concat([keys, key], 2), flow._C.concat([values, value], 2)
    context = scaled_dot_product_attention(query, keys, values, scale=scale)
    x = linear(context.reshape(batch, 1, heads * size), *dense, x)
    active = flow._C.gelu_with_approximate(
        linear(_norm(x, *post_norm, epsilon), *inner), "tanh" if tanh else "none"
    )
    return linear(active, *outer, x), keys, values


decoder_layer = register_operation(
    "decoder_layer",
    reference=_layer_reference,
    doc="a pre-norm transformer block (GPT-2) on one token: x (batch, 1, width), keys and values "
    "(batch, heads, past, head size) of the tokens before, then weight and bias of the input norm, "
    "of query, key and value (a head's three beside each other), of the projection, the post norm, "
    "and the two layers of the MLP, weights (out, in); scale of the scores, epsilon of the norms, "
    "tanh: which form of GELU; to y like x, and the keys and values with the token's own",
    lacks=on_cards(
        "no such operator there: its norms, products and attention one after another, of which "
        "`linear` and `scaled_dot_product_attention` have rows of their own"
    ),
)


@cpu_implementation(
    "decoder_layer",
    _layer_operator,
    dtypes=(flow.float32,),
    not_supported_reasons=gradient_reasons,
)
def fused(*tensors: flow.Tensor, **attributes: Any) -> Any:
    return _layer_operator(*tensors, **attributes)
