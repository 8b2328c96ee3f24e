"""Angles of rotary position embedding, and what stretches them for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError, nearest

import numpy as np

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow"),
    "longrope": ("factor", "attention_factor"),
}
# One number for each angle, and not one for all.
_LISTS = ("short_factor", "long_factor")
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, section 3.2.2) of heads of `head_size` numbers.

    `kind` is how it is stretched beyond the `original` positions that a model was trained with:
    "default", not at all; "linear", positions divided by `factor` (Chen et al. 2023, "Extending
    context window of large language models via positional interpolation", section 2.3); "dynamic",
    a base that grows with the length once that is above `original` (NTK-aware interpolation, Peng
    et al. 2023, "YaRN", appendix B.2); "llama3", only low frequencies divided (Llama 3.1's rule);
    "yarn", the same with other bounds, in turns within the original length, on whole numbers of
    angles (section 3.2 there); "longrope", each frequency divided by a number of its own, of one
    list up to the original length and of another beyond (Ding et al. 2024, "LongRoPE", section
    3.3). The last two multiply cosines and sines by `attention_factor`, which sharpens attention.
    """

    head_size: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0

    @classmethod
    def of(
        cls, head_size: int, theta: float, scaling: Mapping[str, Any] | None, positions: int
    ) -> Rotary:
        """By a `rope_scaling` as in a Llama's config.json, whose type is at "rope_type" or "type".
        Raises UserError for an unknown type or key, a missing one, or a number out of range."""
        given = {str(key): value for key, value in (scaling or {}).items()}
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        for name in ("type", "finetuned"):
            # The second is in files of YaRN's authors, and changes nothing.
            given.pop(name, None)
        if kind not in _KEYS:
            raise UserError(f"rope_scaling of type {kind!r}: this model has {', '.join(_KEYS)}")
        missing = [key for key in _KEYS[kind] if given.get(key) is None]
        if missing:
            raise UserError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}")
        optional = _OPTIONAL.get(kind, ())
        given = {key: x for key, x in given.items() if x is not None or key not in optional}
        known = [*_KEYS[kind], *optional, ORIGINAL]
        for key, value in given.items():
            if key not in known:
                near = nearest(key, known)
                hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
                raise UserError(f"rope_scaling of type {kind!r} has no {key}{hint}")
            count = head_size // 2 if key in _LISTS else 1
            several = isinstance(value, Sequence) and not isinstance(value, str)
            numbers = list(value) if several else [value]
            if (
                several != (key in _LISTS)
                or len(numbers) != count
                or not all(map(_is_positive, numbers))
            ):
                wanted = f"{count} numbers" if key in _LISTS else "a number"
                raise UserError(f"rope_scaling.{key} is {value!r:.80}; expected {wanted} above 0")
            given[key] = tuple(map(float, numbers)) if several else value
        if not theta > 0:
            raise UserError(f"rope_theta is {theta!r}; expected a number above 0")
        if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
            raise UserError(
                "rope_scaling.high_freq_factor must be above low_freq_factor, not "
                f"{given['high_freq_factor']} and {given['low_freq_factor']}"
            )
        original = int(given.pop(ORIGINAL, positions))
        if kind == "longrope":
            given.setdefault("factor", positions / original)
        if kind in _OPTIONAL:
            given.setdefault("attention_factor", _attention_factor(kind, given["factor"], original))
        rotary = cls(head_size, float(theta), kind, original=original, **given)
        if rotary.beta_fast <= rotary.beta_slow:
            raise UserError(
                "rope_scaling.beta_fast must be above beta_slow, not "
                f"{rotary.beta_fast} and {rotary.beta_slow}"
            )
        return rotary

    def settings(self) -> dict[str, Any] | None:
        """What `of` takes as `scaling`."""
        if self.kind == "default":
            return None
        keys = *_KEYS[self.kind], *_OPTIONAL.get(self.kind, ())
        found = {"rope_type": self.kind, **{key: getattr(self, key) for key in keys}}
        found.update({key: list(found[key]) for key in _LISTS if key in found})
        return found if self.kind == "linear" else {**found, ORIGINAL: self.original}

    def varies(self, length: int) -> bool:
        """Whether sequences of `length` tokens have angles of their own."""
        return self.kind in ("dynamic", "longrope") and length > self.original

    def frequencies(self, length: int) -> np.ndarray:
        """Radians per position, (head_size / 2,) float64, in sequences of `length` tokens."""
        base, size = self.theta, self.head_size
        if self.kind == "dynamic" and self.varies(length):
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
        if self.kind == "yarn":
            # Where an angle turns beta times within the original length.
            first, last = (
                math.log(self.original / (2 * math.pi * beta)) / math.log(base) * size / 2
                for beta in (self.beta_fast, self.beta_slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
            ramp = (np.arange(size // 2) - first) / (last - first or 0.001)
            kept = 1 - np.clip(ramp, 0.0, 1.0)
            return frequencies * (kept + (1 - kept) / self.factor)
        if self.kind == "longrope":
            return frequencies / (self.long_factor if self.varies(length) else self.short_factor)
        return frequencies

    def tables(
        self, positions: int, *, first: int = 0, length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of `positions` positions from `first` on, (positions, head_size / 2)
        float32; `length` is that of the whole sequence, if it is another."""
        frequencies = self.frequencies(length or first + positions)
        angles = np.arange(first, first + positions)[:, None] * frequencies
        both = (self.attention_factor * each for each in (np.cos(angles), np.sin(angles)))
        cosines, sines = (each.astype(np.float32) for each in both)
        return cosines, sines


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _attention_factor(kind: str, factor: float, original: int) -> float:
    """What both papers found to be best."""
    factor = max(factor, 1.0)
    if kind == "yarn":
        return 0.1 * math.log(factor) + 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))
