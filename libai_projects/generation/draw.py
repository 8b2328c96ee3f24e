"""Choosing tokens from scores: the best ones, or some at random from a seeded stream.

Streams use the raw output of PCG64, which numpy keeps the same between releases and platforms, so
that every process of a distributed run draws the same tokens from the same scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from oneflow_accel.errors import UserError

import numpy as np


class Stream:
    """Random numbers of one sequence: the same for the same (seed, number)."""

    def __init__(self, seed: int, number: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(number,)))

    def uniform(self) -> float:
        """A float64 in [0, 1)."""
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53


def streams(seed: int | tuple[int, ...], prompt_count: int, returns: int) -> list[Stream]:
    """One stream for each sequence, by prompt; prompt i has seed[i], or `seed + i`."""
    seeds = seed if isinstance(seed, tuple) else range(seed, seed + prompt_count)
    return [Stream(one, number) for one in seeds for number in range(returns)]


def best(scores: np.ndarray) -> np.ndarray:
    """(R,) int64, the first token with the highest of `scores` (R, V); raises as `check_scores`."""
    tokens = scores.argmax(axis=1)
    # argmax takes a NaN for the largest, so it is enough to look at what it found.
    check_scores(np.take_along_axis(scores, tokens[:, None], axis=1))
    return tokens


def drawn(scores: np.ndarray, row_streams: Sequence[Stream]) -> np.ndarray:
    """(R,) int64, one token for each row of `scores` (R, V), drawn with the probabilities
    softmax(scores); takes one number from each row's stream. Raises as `check_scores`."""
    check_scores(scores)
    return np.array(
        [drawn_without_replacement(row, 1, row_streams[i])[0] for i, row in enumerate(scores)],
        dtype=np.int64,
    )


def drawn_without_replacement(scores: np.ndarray, count: int, stream: Stream) -> np.ndarray:
    """At most `count` different indices of `scores` (N,), each drawn with softmax(scores) of those
    left; only ones with a probability above 0. Takes `count` numbers from the stream."""
    candidates = np.flatnonzero(scores > -np.inf)
    values = scores[candidates].astype(np.float64)
    weights = np.exp(values - values.max())
    chosen: list[int] = []
    for number in [stream.uniform() for _ in range(count)]:
        sums = np.cumsum(weights)
        if sums[-1] < np.finfo(np.float64).tiny:
            break
        # The product is below the whole sum, also when rounded: there is such a place.
        place = int(np.searchsorted(sums, number * sums[-1], side="right"))
        chosen.append(int(candidates[place]))
        weights[place] = 0.0
    return np.array(chosen, dtype=np.int64)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, rising, of the `count` largest of `values` (N,) and of all that equal the last."""
    size = values.size
    if count >= size:
        return np.arange(size)
    # The count-th largest of the maxima of disjoint parts is at most the count-th largest
    # value: a bound that leaves few candidates, and far cheaper than a partition of everything.
    parts = 4 * count
    depth = size // parts
    bound = -np.inf
    if depth >= 4:
        maxima = values[: depth * parts].reshape(depth, parts).max(axis=0)
        bound = np.partition(maxima, parts - count)[parts - count]
    candidates = np.flatnonzero(values >= bound)
    found = values[candidates]
    least = np.partition(found, found.size - count)[found.size - count]
    return candidates[found >= least]


def check_scores(scores: np.ndarray) -> None:
    """Raises UserError unless each row of `scores` (R, N) has a finite largest value."""
    if not np.isfinite(scores.max(axis=1)).all():
        raise UserError(
            "there is no token to choose: the scores are NaN or infinite, or every token is "
            "forbidden. If the model's own logits are not finite, its weights are damaged or "
            "overflow in half precision; remove_invalid_values=true goes on all the same. Else "
            "loosen no_repeat_ngram_size, min_length or the functions that forbid tokens"
        )
