"""A tiny GPT-2 and random scores, alike in every Python and numpy (make_generation_golden.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "golden"))

from seeded_weights import uniform

VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS = 97, 64, 32, 2, 4

# What its tokens are as text, for stop strings: ba, be, ... zo.
WORDS = [first + last for first in "bcdfghjklmnprstvwxyz" for last in "aeiou"][:VOCABULARY]


def weights() -> dict[str, np.ndarray]:
    """HF-named, without the tied head; large: distributions are neither flat nor certain."""
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (POSITIONS, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.attn.c_attn.weight": (WIDTH, 3 * WIDTH),
            f"h.{layer}.attn.c_attn.bias": (3 * WIDTH,),
            f"h.{layer}.attn.c_proj.weight": (WIDTH, WIDTH),
            f"h.{layer}.attn.c_proj.bias": (WIDTH,),
            f"h.{layer}.mlp.c_fc.weight": (WIDTH, 4 * WIDTH),
            f"h.{layer}.mlp.c_fc.bias": (4 * WIDTH,),
            f"h.{layer}.mlp.c_proj.weight": (4 * WIDTH, WIDTH),
            f"h.{layer}.mlp.c_proj.bias": (WIDTH,),
        }
    state = {}
    for name, shape in shapes.items():
        bound = {"wte": 0.6, "wpe": 2.0}.get(name[:3], 4.0 * shape[0] ** -0.5)
        state[name] = uniform(name, shape, -bound, bound, seed=11)
    for name in [f"h.{layer}.ln_{number}" for layer in range(LAYERS) for number in (1, 2)]:
        state[f"{name}.weight"] = uniform(f"{name}.weight", (WIDTH,), 0.5, 1.5)
        state[f"{name}.bias"] = uniform(f"{name}.bias", (WIDTH,), -0.3, 0.3)
    state["ln_f.weight"] = uniform("ln_f.weight", (WIDTH,), 0.5, 1.5)
    state["ln_f.bias"] = uniform("ln_f.bias", (WIDTH,), -0.1, 0.1)
    return state


def scores(rows: int, size: int) -> np.ndarray:
    """(rows, size) float32: few high, many low; some forbidden, from row 1 on some equal."""
    values = uniform("scores", (rows, size), 0.0, 1.0, seed=5)
    values = (-6.0 * np.log(values + 1e-4)).astype(np.float32)
    values[0, ::7] = -np.inf
    values[1:] = np.round(values[1:] * 4) / 4
    return values - np.float32(20)
