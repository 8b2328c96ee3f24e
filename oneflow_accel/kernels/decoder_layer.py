"""The operation "decoder_layer": a GPT-2 block on one more token of each sequence.

Generating text token by token, an operator of its own for each product, norm and sum costs more
processor time than all but the products, which are bound by memory.
"""

from __future__ import annotations

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.linear import linear
from oneflow_accel.kernels.operators import Operator, needs_gradient
from oneflow_accel.kernels.registry import implementation, register_operation

import oneflow as flow

Layer = tuple[flow.Tensor, flow.Tensor, flow.Tensor]

_operator = Operator(
    "oneflow_accel_decoder_layer",
    inputs=(
        "x",
        "keys",
        "values",
        "input_norm_weight",
        "input_norm_bias",
        "qkv_weight",
        "qkv_bias",
        "dense_weight",
        "dense_bias",
        "post_norm_weight",
        "post_norm_bias",
        "inner_weight",
        "inner_bias",
        "outer_weight",
        "outer_bias",
    ),
    outputs=("y", "new_keys", "new_values"),
    attributes={"scale": "double", "epsilon": "double", "tanh": "bool"},
)


def _norm(x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, epsilon: float) -> flow.Tensor:
    return flow.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon)


def _reference(
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
    reference=_reference,
    doc="a pre-norm transformer block (GPT-2) on one token: x (batch, 1, width), keys and values "
    "(batch, heads, past, head size) of the tokens before, then weight and bias of the input norm, "
    "of query, key and value (a head's three beside each other), of the projection, the post norm, "
    "and the two layers of the MLP, weights (out, in); scale of the scores, epsilon of the norms, "
    "tanh: which form of GELU; to y like x, and the keys and values with the token's own",
    lacks=dict.fromkeys(
        (CudaBackend.name, MluBackend.name),
        "no such operator there: its norms, products and attention one after another, of which "
        "`linear` and `scaled_dot_product_attention` have rows of their own",
    ),
)


def _not_supported_reasons(*tensors: flow.Tensor, **_attributes: object) -> list[str]:
    if needs_gradient(*tensors):
        return ["it has no gradient, which an argument requires"]
    return []


@implementation(
    "decoder_layer",
    backend=CpuBackend.name,
    dtypes=(flow.float32,),
    missing_reasons=_operator.missing_reasons,
    not_supported_reasons=_not_supported_reasons,
)
def fused(*tensors: flow.Tensor, scale: float, epsilon: float, tanh: bool) -> Layer:
    y, keys, values = _operator(*tensors, scale=scale, epsilon=epsilon, tanh=tanh)
    return y, keys, values
