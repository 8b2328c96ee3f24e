"""Angles of rotary position embedding, and what stretches them for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError, nearest

import numpy as np

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, section 3.2.2) of heads of `head_size` numbers.

    `kind` is how it is stretched beyond the `original` positions that a model was trained with:
    "default", not at all; "linear", positions divided by `factor` (Chen et al. 2023, "Extending
    context window of large language models via positional interpolation", section 2.3); "dynamic",
    a base that grows with the length once that is above `original` (NTK-aware interpolation, Peng
    et al. 2023, "YaRN", appendix B.2); "llama3", only low frequencies divided (Llama 3.1's rule).
    """

    head_size: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def of(
        cls, head_size: int, theta: float, scaling: Mapping[str, Any] | None, positions: int
    ) -> Rotary:
        """By a `rope_scaling` as in a Llama's config.json, whose type is at "rope_type" or "type".
        Raises UserError for an unknown type or key, a missing one, or a number out of range."""
        given = {str(key): value for key, value in (scaling or {}).items()}
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        given.pop("type", None)
        if kind not in _KEYS:
            raise UserError(f"rope_scaling of type {kind!r}: this model has {', '.join(_KEYS)}")
        missing = [key for key in _KEYS[kind] if given.get(key) is None]
        if missing:
            raise UserError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}")
        for key, value in given.items():
            known = [*_KEYS[kind], ORIGINAL]
            if key not in known:
                near = nearest(key, known)
                hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
                raise UserError(f"rope_scaling of type {kind!r} has no {key}{hint}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(f"rope_scaling.{key} is {value!r}; expected a number above 0")
        if not theta > 0:
            raise UserError(f"rope_theta is {theta!r}; expected a number above 0")
        if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
            raise UserError(
                "rope_scaling.high_freq_factor must be above low_freq_factor, not "
                f"{given['high_freq_factor']} and {given['low_freq_factor']}"
            )
        original = int(given.pop(ORIGINAL, positions))
        return cls(head_size, float(theta), kind, original=original, **given)

    def settings(self) -> dict[str, Any] | None:
        """What `of` takes as `scaling`."""
        if self.kind == "default":
            return None
        found = {"rope_type": self.kind, **{key: getattr(self, key) for key in _KEYS[self.kind]}}
        return found if self.kind == "linear" else {**found, ORIGINAL: self.original}

    def varies(self, length: int) -> bool:
        """Whether sequences of `length` tokens have angles of their own."""
        return self.kind == "dynamic" and length > self.original

    def frequencies(self, length: int) -> np.ndarray:
        """Radians per position, (head_size / 2,) float64, in sequences of `length` tokens."""
        base, size = self.theta, self.head_size
        if self.varies(length):
            stretch = self.factor * length / self.original - (self.factor - 1)
            base *= stretch ** (size / (size - 2))
        frequencies = base ** (-np.arange(0, size, 2) / size)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            # Turns within the original length: few are divided, many kept, and between is a ramp.
            turns = self.original * frequencies / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            return frequencies * (kept + (1 - kept) / self.factor)
        return frequencies

    def tables(
        self, positions: int, *, first: int = 0, length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of `positions` positions from `first` on, (positions, head_size / 2)
        float32; `length` is that of the whole sequence, if it is another."""
        frequencies = self.frequencies(length or first + positions)
        angles = np.arange(first, first + positions)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
