"""Multiplies out the Monarch layers of a GPT-2, for formats that have dense layers only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from libai_projects.weights.mapping import State
from libai_projects.weights.monarch import OUTER, QKV, QKV_PARTS
from monarch_flow.projection import monarch_to_dense

_FACTOR = re.compile(rf"(.+?)\.(?:({'|'.join(QKV_PARTS)})\.)?blkdiag1\Z")


def densified(state: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> State:
    """The same function with dense layers only.

    Args:
        state: weights in LiBai 0.1.1's layout.
        config: hidden_size, ffn_hidden_size and num_attention_heads.

    Returns:
        Weights (in, out) in place of the factors; `state` itself where there are none.
    """
    layers = dict.fromkeys(found[1] for found in map(_FACTOR.match, state) if found)
    result = {
        name: array for name, array in state.items() if not name.startswith(tuple(_below(layers)))
    }
    for layer in layers:
        inputs = config["ffn_hidden_size" if layer.endswith(OUTER) else "hidden_size"]
        names = [f"{layer}.{part}" for part in QKV_PARTS] if layer.endswith(QKV) else [layer]
        weights = [_weight(state, name, inputs) for name in names]
        biases = [state[f"{name}.bias"] for name in names]
        if layer.endswith(QKV):
            weights = [_interleaved(weights, config["num_attention_heads"])]
            biases = [_interleaved(biases, config["num_attention_heads"])]
        result[f"{layer}.weight"], result[f"{layer}.bias"] = weights[0], biases[0]
    return result


def _below(layers: Mapping[str, None]) -> list[str]:
    return [f"{layer}." for layer in layers]


def _weight(state: Mapping[str, np.ndarray], name: str, inputs: int) -> np.ndarray:
    """(in, out)."""
    first, second = state[f"{name}.blkdiag1"], state[f"{name}.blkdiag2"]
    outputs = len(state[f"{name}.bias"])
    return np.ascontiguousarray(monarch_to_dense(first, second, outputs, inputs).T)


def _interleaved(parts: list[np.ndarray], heads: int) -> np.ndarray:
    """Three arrays with a last axis (heads, head size) as one of (heads, 3, head size)."""
    split = [part.reshape(*part.shape[:-1], heads, -1) for part in parts]
    return np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], -1)
