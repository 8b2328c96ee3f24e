"""Single operators in eager PyTorch; each maker returns one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.serve import Maker, Step

Shape = tuple[int, ...]


def _forward_backward(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Step:
    """y = fn(x) and its gradient."""
    x.requires_grad = True
    dy = torch.randn_like(fn(x))

    def step() -> None:
        fn(x).backward(dy)
        x.grad = None

    return step


def _without_gradient(fn: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        with torch.no_grad():
            fn()

    return step


def linear(rows: int, inner: int, outer: int, part: str) -> Step:
    x, weight, dy = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    return _without_gradient(
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
        return _without_gradient(lambda: torch.bmm(query, key.transpose(1, 2)))
    return _without_gradient(lambda: torch.bmm(scores, query))


def softmax(shape: Shape) -> Step:
    return _forward_backward(lambda x: torch.softmax(x, dim=-1), torch.randn(shape))


def gelu(shape: Shape, approximate: str) -> Step:
    return _forward_backward(nn.GELU(approximate=approximate), torch.randn(shape))


def layer_norm(shape: Shape) -> Step:
    return _forward_backward(nn.LayerNorm(shape[-1]), torch.randn(shape))


def cross_entropy(shape: Shape) -> Step:
    labels = torch.randint(shape[1], (shape[0],))
    logits = torch.randn(shape, requires_grad=True)

    def step() -> None:
        nn.functional.cross_entropy(logits, labels).backward()
        logits.grad = None

    return step


def attention(batch: int, heads: int, tokens: int, causal: bool) -> Step:
    """From the packed projection (B, T, 3 H D) to what the output projection takes (B, T, H D), as
    timm and transformers do it."""

    def run(packed: torch.Tensor) -> torch.Tensor:
        qkv = packed.reshape(batch, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=causal)
        return out.transpose(1, 2).reshape(batch, tokens, heads * 64)

    return _forward_backward(run, torch.randn(batch, tokens, 3 * heads * 64))


def relu(shape: Shape) -> Step:
    x = torch.randn(shape)
    return _without_gradient(lambda: torch.relu(x))


def add(shape: Shape) -> Step:
    x, y = torch.randn(shape), torch.randn(shape)
    return _without_gradient(lambda: x + y)


def bias_add(shape: Shape) -> Step:
    x, bias = torch.randn(shape), torch.randn(shape[-1])
    return _without_gradient(lambda: x + bias)


def permute(shape: Shape) -> Step:
    """(B, T, H, D) to (B, H, T, D)."""
    x = torch.randn(shape[0], shape[1], shape[2] // 64, 64)
    return _without_gradient(lambda: x.permute(0, 2, 1, 3).contiguous())


def dropout(shape: Shape) -> Step:
    return _forward_backward(nn.Dropout(0.1), torch.randn(shape))


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
        return _without_gradient(forward)
    dy = torch.randn_like(forward())
    mask = (part == "data grad", part == "weight grad", False)
    geometry = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward
    return _without_gradient(lambda: backward(dy, x, weight, None, *geometry, mask)[0])


MAKERS: dict[str, Maker] = {
    function.__name__: function
    for function in (
        linear,
        batched_matmul,
        softmax,
        gelu,
        layer_norm,
        cross_entropy,
        attention,
        relu,
        add,
        bias_add,
        permute,
        dropout,
        conv,
    )
}
