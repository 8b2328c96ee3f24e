"""A GPT-2 in numpy float64, written from the paper's description: the tests' StepModel."""

from __future__ import annotations

import math
from types import SimpleNamespace

from oneflow_accel import machine

import numpy as np

from libai_projects.models.pages import PagedCache, Step
from libai_projects.models.step_model import StepModel


class NumpyGPT2:
    """A StepModel from a state dict with the names of Hugging Face's GPT-2; `steps` has (rows, most
    tokens of a row) of each call of `run`."""

    plan = StepModel.plan

    def __init__(self, weights: dict[str, np.ndarray], heads: int) -> None:
        self._weights = {
            name.removeprefix("transformer."): np.asarray(value, dtype=np.float64)
            for name, value in weights.items()
        }
        self._heads = heads
        self._layers = 1 + max(
            int(name.split(".")[1]) for name in self._weights if name.startswith("h.")
        )
        self.vocab_size = len(self._weights["wte.weight"])
        self.max_positions = len(self._weights["wpe.weight"])
        self.bytes_per_token = 16 * self._layers * self._weights["wte.weight"].shape[1]
        self.steps: list[tuple[int, int]] = []

    def free_memory(self) -> int | None:
        return machine.free_memory()

    def new_cache(self, pages: int | None = None) -> SimpleNamespace:
        shape = (self._layers, 2, 0, 64, self._weights["wte.weight"].shape[1])
        return SimpleNamespace(pages=PagedCache(pages), written=np.zeros(shape))

    def run(self, step: Step, cache: SimpleNamespace) -> np.ndarray:
        self.steps.append((len(step.tables), int(np.bincount(step.sequences).max())))
        weights, places, old = self._weights, step.positions, cache.written
        more = cache.pages.pages - old.shape[2]
        written = np.pad(old, [(0, 0), (0, 0), (0, more), (0, 0), (0, 0)]) if more else old
        cache.written = written
        for origin, copy in step.copies:
            written[:, :, copy] = written[:, :, origin]
        # Of each token: the pages and places in them of all up to the last one of any.
        slots, page = np.arange(places.max() + 1), step.tables[step.sequences, places // 64]
        held = step.tables[step.sequences][:, slots // 64]
        hidden = weights["wte.weight"][step.ids] + weights["wpe.weight"][places]
        for layer in range(self._layers):
            prefix = f"h.{layer}"
            mixed = self._linear(self._norm(hidden, f"{prefix}.ln_1"), f"{prefix}.attn.c_attn")
            query, *pair = np.split(mixed, 3, axis=-1)
            written[layer][:, page, places % 64] = pair
            query, keys, values = (
                x.reshape(*x.shape[:-1], self._heads, -1)
                for x in (query, *written[layer][:, held, slots % 64])
            )
            scores = np.einsum("qhi,qkhi->qhk", query, keys) / math.sqrt(query.shape[-1])
            scores = np.where(slots <= places[:, None, None], scores, -np.inf)
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            context = np.einsum("qhk,qkhi->qhi", weight, values).reshape(hidden.shape)
            hidden = hidden + self._linear(context, f"{prefix}.attn.c_proj")
            wide = self._linear(self._norm(hidden, f"{prefix}.ln_2"), f"{prefix}.mlp.c_fc")
            hidden = hidden + self._linear(_gelu(wide), f"{prefix}.mlp.c_proj")
        logits = self._product(self._norm(hidden[step.last], "ln_f"), weights["wte.weight"])
        return logits.astype(np.float32)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._product(x, self._weights[f"{name}.weight"].T) + self._weights[f"{name}.bias"]

    def _product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x @ weight.T


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
