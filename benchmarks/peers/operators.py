"""The operators that PyTorch has its own names for; each maker returns one step."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.both import Both
from benchmarks.serve import Maker, Step

BOTH = Both(torch)


def linear(rows: int, inner: int, outer: int, part: str) -> Step:
    x, weight, dy = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    return BOTH.without_gradient(
        {
            "forward": lambda: x @ weight.t(),
            "data grad": lambda: dy @ weight,
            "weight grad": lambda: dy.t() @ x,
        }[part]
    )


def batched_matmul(batch: int, tokens: int, width: int, part: str) -> Step:
    query, key = torch.randn(batch, tokens, width), torch.randn(batch, tokens, width)
    scores = torch.randn(batch, tokens, tokens)
    if part == "scores":
        return BOTH.without_gradient(lambda: torch.bmm(query, key.transpose(1, 2)))
    return BOTH.without_gradient(lambda: torch.bmm(scores, query))


def attention(batch: int, heads: int, tokens: int, causal: bool) -> Step:
    """From the packed projection (B, T, 3 H D) to what the output projection takes (B, T, H D), as
    timm and transformers do it."""

    def run(packed: torch.Tensor) -> torch.Tensor:
        qkv = packed.reshape(batch, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=causal)
        return out.transpose(1, 2).reshape(batch, tokens, heads * 64)

    return BOTH.forward_backward(run, torch.randn(batch, tokens, 3 * heads * 64))


def conv(
    batch: int, size: int, inner: int, outer: int, kernel: int, stride: int, part: str
) -> Step:
    """Channels last; the gradients' operator called directly, as autograd may copy a leaf's."""
    last = torch.channels_last
    x = torch.randn(batch, inner, size, size).to(memory_format=last)
    weight = torch.randn(outer, inner, kernel, kernel).to(memory_format=last)

    def forward() -> torch.Tensor:
        return nn.functional.conv2d(x, weight, stride=stride, padding=kernel // 2)

    if part == "forward":
        return BOTH.without_gradient(forward)
    dy = torch.randn_like(forward())
    mask = (part == "data grad", part == "weight grad", False)
    geometry = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward
    return BOTH.without_gradient(lambda: backward(dy, x, weight, None, *geometry, mask)[0])


MAKERS: dict[str, Maker] = {
    function.__name__: function for function in (linear, batched_matmul, attention, conv)
}
