"""Shapes of the parameters of ResNet50 and GPT-2 small, for the optimizers' rows. Pure Python."""

from __future__ import annotations

Shape = tuple[int, ...]


def parameter_shapes(model: str) -> list[Shape]:
    """Shapes of all parameters of "resnet50" (161, 25.6 M) or "gpt2" (148, 124.4 M)."""
    return {"resnet50": _resnet50, "gpt2": _gpt2}[model]()


def _resnet50() -> list[Shape]:
    def conv(inner: int, outer: int, kernel: int) -> list[Shape]:
        return [(outer, inner, kernel, kernel), (outer,), (outer,)]

    shapes = conv(3, 64, 7)
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv(inner, width, 1) + conv(width, width, 3) + conv(width, 4 * width, 1)
            if block == 0:
                shapes += conv(inner, 4 * width, 1)
            inner = 4 * width
    return [*shapes, (1000, inner), (1000,)]


def _gpt2(width: int = 768, layers: int = 12) -> list[Shape]:
    def linear(inner: int, outer: int) -> list[Shape]:
        return [(outer, inner), (outer,)]

    norm: list[Shape] = [(width,), (width,)]
    attention = linear(width, 3 * width) + linear(width, width)
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    return [(50257, width), (1024, width), *(layers * (norm + attention + norm + mlp)), *norm]
