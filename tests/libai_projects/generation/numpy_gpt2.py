"""A GPT-2 in numpy float64, written from the paper's description: the tests' StepModel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from oneflow_accel import machine

import numpy as np


@dataclass
class _Cache:
    use_cache: bool
    ids: np.ndarray
    positions: np.ndarray
    keys_values: list[tuple[np.ndarray, np.ndarray]]


class NumpyGPT2:
    """A StepModel from a state dict with the names of Hugging Face's GPT-2.

    `extra_columns` of logits beyond the vocabulary are larger than all others, as padding rows of a
    tensor-parallel embedding may be; `steps` has (rows, tokens) of each call of `step`.
    """

    def __init__(self, weights: dict[str, np.ndarray], heads: int, extra_columns: int = 0) -> None:
        self._weights = {
            name.removeprefix("transformer."): np.asarray(value, dtype=np.float64)
            for name, value in weights.items()
        }
        self._heads = heads
        self._extra_columns = extra_columns
        self._layers = 1 + max(
            int(name.split(".")[1]) for name in self._weights if name.startswith("h.")
        )
        self.vocab_size = len(self._weights["wte.weight"])
        self.max_positions = len(self._weights["wpe.weight"])
        self.bytes_per_token = 16 * self._layers * self._weights["wte.weight"].shape[1]
        self.steps: list[tuple[int, int]] = []

    def free_memory(self) -> int | None:
        return machine.free_memory()

    def start(self, batch_size: int, use_cache: bool = True) -> _Cache:
        empty = np.empty((batch_size, 0), dtype=np.int64)
        width = self._weights["wte.weight"].shape[1] // self._heads
        nothing = np.empty((batch_size, self._heads, 0, width))
        return _Cache(use_cache, empty, empty, [(nothing, nothing)] * self._layers)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Any
    ) -> np.ndarray:
        assert ids.dtype == positions.dtype == np.int64
        assert ids.shape == positions.shape
        self.steps.append(ids.shape)
        cache.ids = np.concatenate([cache.ids, ids], axis=1)
        cache.positions = np.concatenate([cache.positions, positions], axis=1)
        if mask is None:
            mask = np.ones(cache.ids.shape, dtype=bool)
        assert mask.dtype == bool
        assert mask.shape == cache.ids.shape
        logits = self._forward(cache, ids.shape[1], mask)
        extra = np.full((len(ids), self._extra_columns), 1e6)
        return np.concatenate([logits, extra], axis=1).astype(np.float32)

    def select(self, cache: Any, rows: np.ndarray) -> None:
        cache.ids, cache.positions = cache.ids[rows], cache.positions[rows]
        cache.keys_values = [(keys[rows], values[rows]) for keys, values in cache.keys_values]

    def _forward(self, cache: _Cache, new: int, mask: np.ndarray) -> np.ndarray:
        weights = self._weights
        width = cache.ids.shape[1]
        start = width - new if cache.use_cache else 0
        ids, positions = cache.ids[:, start:], cache.positions[:, start:]
        seen = np.tril(np.ones((width, width), dtype=bool))[start:]
        allowed = mask[:, None, None, :] & seen
        hidden = weights["wte.weight"][ids] + weights["wpe.weight"][positions]
        for layer in range(self._layers):
            prefix = f"h.{layer}"
            normed = self._norm(hidden, f"{prefix}.ln_1")
            mixed = self._linear(normed, f"{prefix}.attn.c_attn")
            query, key, value = (self._split(part) for part in np.split(mixed, 3, axis=-1))
            if cache.use_cache:
                key, value = (
                    np.concatenate(pair, axis=2)
                    for pair in zip(cache.keys_values[layer], (key, value), strict=True)
                )
                cache.keys_values[layer] = (key, value)
            scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
            weight = np.exp(np.where(allowed, scores, -1e30) - scores.max(-1, keepdims=True))
            weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)  # padding sees nothing
            joined = (weight @ value).swapaxes(1, 2).reshape(hidden.shape)
            hidden = hidden + self._linear(joined, f"{prefix}.attn.c_proj")
            wide = self._linear(self._norm(hidden, f"{prefix}.ln_2"), f"{prefix}.mlp.c_fc")
            hidden = hidden + self._linear(_gelu(wide), f"{prefix}.mlp.c_proj")
        return self._product(self._norm(hidden[:, -1], "ln_f"), weights["wte.weight"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._product(x, self._weights[f"{name}.weight"].T) + self._weights[f"{name}.bias"]

    def _product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x @ weight.T

    def _split(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
