"""Weights and images for vision models that any Python with numpy makes alike, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tests.golden import seeded_weights

# Cases that timm has computed, by name: the class that timm calls so, with arguments that its
# constructor and ours both take under the names here (`make_golden.py` translates).
CASES: dict[str, dict[str, Any]] = {
    "vit": {
        "kind": "vit",
        "img_size": [16, 16],
        "patch_size": 4,
        "in_chans": 3,
        "num_classes": 11,
        "embed_dim": 48,
        "depth": 3,
        "num_heads": 4,
        "mlp_ratio": 3.0,
        "qkv_bias": False,
        "norm_eps": 1e-5,
    },
    "vit with bias, gray, not square": {
        "kind": "vit",
        "img_size": [12, 20],
        "patch_size": 4,
        "in_chans": 1,
        "num_classes": 5,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "norm_eps": 1e-6,
    },
    "mixer": {
        "kind": "mixer",
        "img_size": [16, 16],
        "patch_size": 4,
        "in_chans": 3,
        "num_classes": 7,
        "embed_dim": 32,
        "depth": 3,
        "token_ratio": 0.5,
        "channel_ratio": 4.0,
    },
}
BATCH = 3


def state(named_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """No initial values: matrices uniform, variance 1 / fan-in, norms around 1, others around 0."""
    arrays = {}
    for name, shape in named_shapes:
        if name.endswith("norm.weight") or "norm1.weight" in name or "norm2.weight" in name:
            arrays[name] = seeded_weights.uniform(name, shape, 0.5, 1.5)
        elif name.endswith(("bias", "cls_token", "pos_embed")):
            arrays[name] = seeded_weights.uniform(name, shape, -0.3, 0.3)
        else:
            # Of a Monarch factor (blocks, out, in) the last is the fan-in.
            fan_in = shape[-1] if len(shape) == 3 else int(np.prod(shape[1:]))
            bound = (3.0 / fan_in) ** 0.5
            arrays[name] = seeded_weights.uniform(name, shape, -bound, bound)
    return arrays


def images(case: Mapping[str, Any], batch: int = BATCH) -> np.ndarray:
    """(batch, in_chans, *img_size), float32."""
    return seeded_weights.uniform("images", (batch, case["in_chans"], *case["img_size"]), -2, 2)


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A factor for a gradient, or a loss's logits, that tells every element from every other."""
    return seeded_weights.uniform(f"probe of {name}", shape, -1.0, 1.0).astype(np.float64)
