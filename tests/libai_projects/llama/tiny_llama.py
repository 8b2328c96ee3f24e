"""Tiny Llamas, alike in every Python and numpy (make_llama_golden.py): settings and weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden"))

from seeded_weights import uniform

VOCABULARY, WIDTH, INNER, LAYERS = 96, 32, 80, 2
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What differs from the settings below, as in a config.json.
CASES: dict[str, dict[str, Any]] = {
    "heads of their own": {"num_key_value_heads": 4},
    "shared heads": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 12},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    "dynamic": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "llama3": {
        "rope_parameters": {
            **LLAMA3,
            "original_max_position_embeddings": 16,
            "rope_theta": 500000.0,
        }
    },
}


def content(case: str) -> dict[str, Any]:
    """config.json's."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **CASES[case],
    }


def weights(case: str) -> dict[str, np.ndarray]:
    """By Hugging Face's names; large, so that distributions are neither flat nor certain."""
    settings = content(case)
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    size = settings.get("head_dim", WIDTH // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (heads * size, WIDTH),
            "self_attn.k_proj": (kv_heads * size, WIDTH),
            "self_attn.v_proj": (kv_heads * size, WIDTH),
            "self_attn.o_proj": (WIDTH, heads * size),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }.items():
            shapes[f"{block}.{name}.weight"] = shape
            if settings.get("attention_bias" if name.startswith("self") else "mlp_bias"):
                shapes[f"{block}.{name}.bias"] = shape[:1]
        shapes[f"{block}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (WIDTH,)
    shapes["model.norm.weight"] = (WIDTH,)
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    return {name: _draw(name, shape) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return uniform(name, shape, 0.5, 1.5)
    if "embed" in name or "lm_head" in name:
        return uniform(name, shape, -0.8, 0.8, seed=11)
    bound = 0.3 if len(shape) == 1 else 3.0 * shape[1] ** -0.5
    return uniform(name, shape, -bound, bound, seed=11)


def tokens() -> np.ndarray:
    """(2, 41): inputs and the ones after them."""
    return np.random.default_rng(5).integers(0, VOCABULARY, (2, 41))
