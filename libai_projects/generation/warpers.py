"""Narrowing a distribution before a token is drawn: temperature, top-k, top-p, min-p, typical.

Each takes scores (R, V) float32 and returns them with what is left out at -inf; `keep` tokens
always stay. Only as many tokens are sorted as a rule needs: a full sort of 50,257 scores costs more
than all else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from libai_projects.generation.draw import largest
from libai_projects.generation.options import GenerationOptions

Warper = Callable[[np.ndarray], np.ndarray]

# So many tokens are looked at first; if too few, four times as many, and so on.
_FIRST_COUNT = 256


def build_warpers(options: GenerationOptions) -> list[Warper]:
    """The warpers that `options` ask for; none unless tokens are drawn."""
    if not options.do_sample:
        return []
    # Beams need one token to go on with, should the others all be ends of sequences.
    keep = 1 if options.num_beams == 1 else max(2, options.end_ids.size + 1)
    chain: list[Warper] = []
    if options.temperature != 1:
        chain.append(lambda scores: temperature(scores, options.temperature))
    if options.top_k:
        chain.append(lambda scores: top_k(scores, options.top_k or 0, keep))
    if options.top_p is not None and options.top_p < 1:
        chain.append(lambda scores: top_p(scores, options.top_p or 1.0, keep))
    if options.min_p:
        chain.append(lambda scores: min_p(scores, options.min_p or 0.0, keep))
    if options.typical_p is not None and options.typical_p < 1:
        chain.append(lambda scores: typical(scores, options.typical_p or 1.0, keep))
    return chain


def temperature(scores: np.ndarray, value: float) -> np.ndarray:
    """Flatten (value > 1) or sharpen (value < 1) each distribution; a value near 0 leaves only the
    largest scores, one beyond float32 makes all equal that are not forbidden."""
    divisor = np.float32(min(value, float(np.finfo(np.float32).max)))
    with np.errstate(over="ignore"):
        scaled = scores / divisor
        lost = ~np.isfinite(scaled.max(axis=1))
        if lost.any():
            # Only differences matter, and those to the largest score overflow to -inf alone.
            shifted = scores[lost] - scores[lost].max(axis=1, keepdims=True)
            scaled[lost] = shifted / divisor
    return scaled


def top_k(scores: np.ndarray, count: int, keep: int = 1) -> np.ndarray:
    """Leave the `count` largest scores of each row; all that equal the last of them stay."""
    left = np.full_like(scores, -np.inf)
    for row, output in zip(scores, left, strict=True):
        chosen = largest(row, max(count, keep))
        output[chosen] = row[chosen]
    return left


def top_p(scores: np.ndarray, mass: float, keep: int = 1) -> np.ndarray:
    """Leave the fewest likeliest tokens whose probabilities add up to `mass`: nucleus sampling,
    Holtzman et al., 2020, arXiv:1904.09751."""

    def kept(row: np.ndarray, probability: np.ndarray) -> np.ndarray:
        order, sums = _until(row, probability, mass)
        before = np.concatenate([[0.0], sums[:-1]])
        return order[(before < mass) | (np.arange(order.size) < keep)]

    return _leave(scores, kept)


def min_p(scores: np.ndarray, share: float, keep: int = 1) -> np.ndarray:
    """Leave the tokens that have at least `share` of the likeliest one's probability: min-p
    sampling, Nguyen et al., 2024, arXiv:2407.01082."""

    def kept(row: np.ndarray, probability: np.ndarray) -> np.ndarray:
        near = probability >= share * probability.max()
        near[largest(row, keep)] = True
        return np.flatnonzero(near)

    return _leave(scores, kept)


def typical(scores: np.ndarray, mass: float, keep: int = 1) -> np.ndarray:
    """Leave the tokens whose information is nearest to the entropy, with probabilities that add up
    to `mass`: locally typical sampling, Meister et al., 2022, arXiv:2202.00666."""

    def kept(row: np.ndarray, probability: np.ndarray) -> np.ndarray:
        # A probability that rounds to 0 adds nothing to the entropy: 0 x log(0) counts as 0.
        information = -np.log(np.maximum(probability, 1e-300))
        distance = np.abs(information - (probability * information).sum())
        order, sums = _until(-distance, probability, mass)
        last = min(int((sums < mass).sum()), order.size - 1)
        near = distance <= distance[order[last]]
        near[order[:keep]] = True
        return np.flatnonzero(near)

    return _leave(scores, kept)


def _leave(scores: np.ndarray, kept: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Keep the tokens that `kept` picks from a row's finite scores and probabilities (float64)."""
    left = np.full_like(scores, -np.inf)
    for row, output in zip(scores, left, strict=True):
        candidates = np.flatnonzero(row > -np.inf)
        values = row[candidates].astype(np.float64)
        probability = np.exp(values - values.max())
        probability /= probability.sum()
        chosen = candidates[kept(values, probability)]
        output[chosen] = row[chosen]
    return left


def _until(
    values: np.ndarray, probability: np.ndarray, mass: float
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the largest `values`, falling, until their probabilities add up to `mass` or more,
    and the cumulative sums. Of equal values the later one comes first, as in a rising stable sort
    that is read backwards."""
    count = _FIRST_COUNT
    while True:
        found = largest(values, count)
        if found.size == values.size or probability[found].sum() >= mass:
            order = found[np.argsort(values[found], kind="stable")[::-1]]
            return order, np.cumsum(probability[order])
        count *= 4
