"""A tiny GPT: sizes, first parameters and data from NumPy, for LiBai's model and for references."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 32, 4, 128, 16, 8
STEPS = 6
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM, LAYER_NORM_EPSILON = 2e-3, 0.01, 1.0, 1e-5


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters as LiBai names them below `GPT_model.`; linear weights are (in, out)."""
    yield "embeddings.token_embeddings.weight", (VOCABULARY, HIDDEN)
    yield "embeddings.position_embeddings.weight", (SEQUENCE, HIDDEN)
    for layer in range(LAYERS):
        for name, inputs, outputs in (
            ("self_attention.query_key_value", HIDDEN, 3 * HIDDEN),
            ("self_attention.dense", HIDDEN, HIDDEN),
            ("mlp.dense_h_to_4h", HIDDEN, 4 * HIDDEN),
            ("mlp.dense_4h_to_h", 4 * HIDDEN, HIDDEN),
        ):
            yield f"transformer.layers.{layer}.{name}.weight", (inputs, outputs)
            yield f"transformer.layers.{layer}.{name}.bias", (outputs,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"transformer.layers.{layer}.{name}.weight", (HIDDEN,)
            yield f"transformer.layers.{layer}.{name}.bias", (HIDDEN,)
    yield "transformer.layernorm_f.weight", (HIDDEN,)
    yield "transformer.layernorm_f.bias", (HIDDEN,)


def parameters() -> dict[str, np.ndarray]:
    """The first value of each parameter, float32; none is zero, so that each has a gradient."""
    generator = np.random.default_rng(0)
    return {
        name: generator.normal(
            1.0 if "layernorm" in name and name.endswith("weight") else 0.0, 0.1, shape
        ).astype(np.float32)
        for name, shape in shapes()
    }


def batches() -> np.ndarray:
    """Token ids, int64, (STEPS, BATCH, SEQUENCE + 1): inputs and labels; few, so that it learns."""
    return np.random.default_rng(1).integers(0, 20, (STEPS, BATCH, SEQUENCE + 1))
