"""The operators that OneFlow has its own names for; each maker returns one step."""

from __future__ import annotations

from oneflow_accel.kernels.attention import packed_attention
from oneflow_accel.kernels.operators import Operator

import oneflow as flow

from benchmarks.both import Both
from benchmarks.serve import Maker, Step

BOTH = Both(flow)

_GEOMETRY = {
    "num_spatial_dims": "int32",
    "padding_before": "list_int32",
    "data_format": "string",
    "kernel_size": "list_int32",
    "strides": "list_int32",
    "dilation_rate": "list_int32",
    "groups": "int32",
}
_conv_data_grad = Operator(
    "conv_data_grad", inputs=("dy", "filter", "x_like"), outputs=("dx",), attributes=_GEOMETRY
)
_conv_filter_grad = Operator(
    "conv_filter_grad", inputs=("dy", "x"), outputs=("filter_diff",), attributes=_GEOMETRY
)


def linear(rows: int, inner: int, outer: int, part: str) -> Step:
    x, weight, dy = flow.randn(rows, inner), flow.randn(outer, inner), flow.randn(rows, outer)
    return BOTH.without_gradient(
        {
            "forward": lambda: flow._C.matmul(x, weight, transpose_b=True),
            "data grad": lambda: flow._C.matmul(dy, weight),
            "weight grad": lambda: flow._C.matmul(dy, x, transpose_a=True),
        }[part]
    )


def batched_matmul(batch: int, tokens: int, width: int, part: str) -> Step:
    query, key = flow.randn(batch, tokens, width), flow.randn(batch, tokens, width)
    scores = flow.randn(batch, tokens, tokens)
    if part == "scores":
        return BOTH.without_gradient(lambda: flow._C.batch_matmul(query, key, transpose_b=True))
    return BOTH.without_gradient(lambda: flow._C.batch_matmul(scores, query))


def attention(batch: int, heads: int, tokens: int, causal: bool) -> Step:
    """From the packed projection (B, T, 3 H D) to what the output projection takes (B, T, H D)."""
    packed = flow.randn(batch, tokens, 3 * heads * 64)
    return BOTH.forward_backward(lambda x: packed_attention(x, heads, causal=causal), packed)


def conv(
    batch: int, size: int, inner: int, outer: int, kernel: int, stride: int, part: str
) -> Step:
    """Channels last; the gradients' operators called directly, as autograd would copy a leaf's."""
    attributes = {"stride": [stride] * 2, "padding": [kernel // 2] * 2, "dilation": [1, 1]}
    x = flow.randn(batch, size, size, inner)
    weight = flow.randn(outer, kernel, kernel, inner)

    def forward() -> flow.Tensor:
        return flow._C.conv2d(x, weight, None, groups=1, channel_pos="channels_last", **attributes)

    if part == "forward":
        return BOTH.without_gradient(forward)
    dy = flow.randn(*forward().shape)
    geometry = {
        "num_spatial_dims": 2,
        "padding_before": [kernel // 2] * 2,
        "data_format": "channels_last",
        "kernel_size": [kernel] * 2,
        "strides": [stride] * 2,
        "dilation_rate": [1, 1],
        "groups": 1,
    }
    if part == "data grad":
        return BOTH.without_gradient(lambda: _conv_data_grad(dy, weight, x, **geometry)[0])
    return BOTH.without_gradient(lambda: _conv_filter_grad(dy, x, **geometry)[0])


MAKERS: dict[str, Maker] = {
    function.__name__: function for function in (linear, batched_matmul, attention, conv)
}
