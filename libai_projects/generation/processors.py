"""What happens to the scores of the next token, and how one is chosen from them.

Processors change scores by the sequence so far: each takes (Rows, scores (R, V) float32) and
returns the new scores; it may write into the ones it was given. Warpers narrow the distribution
before a token is drawn: they say which scores (n,) of a row stay; `keep` tokens always do. Each
row is narrowed and drawn from by itself, so that it gets the same tokens beside any others, and
only what is left of it is looked at again: of 50,257 scores each pass counts, and a full sort
costs more than all else. The order of both is that of transformers, on which the result depends.

Streams use the raw output of PCG64, which numpy keeps the same between releases and platforms, so
that every process of a distributed run draws the same tokens from the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from oneflow_accel.errors import UserError

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from libai_projects.generation.options import (
    GenerationOptions,
    LogitsProcessor,
    PrefixFunction,
    as_ids,
)
from libai_projects.generation.sequences import Rows


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
    check_scores(scores[np.arange(len(scores)), tokens, None])
    return tokens


@cache
def _every(vocab_size: int) -> np.ndarray:
    return np.arange(vocab_size)


class Candidates(NamedTuple):
    """What may follow one row: `tokens` (n,) int64 and their `scores` (n,) float32."""

    tokens: np.ndarray
    scores: np.ndarray


# Scores of a row whose weights are added up in one go.
_PART = 256


@np.errstate(over="ignore")
def drawn(candidates: Sequence[Candidates], row_streams: Sequence[Stream]) -> np.ndarray:
    """(R,) int64, one token for each row, drawn with the probabilities softmax(scores); takes two
    numbers from each row's stream: one chooses a part of the row, the other a token in it."""
    chosen = np.empty(len(candidates), dtype=np.int64)
    for row, ((tokens, scores), stream) in enumerate(zip(candidates, row_streams, strict=True)):
        weights = np.zeros((-(-scores.size // _PART), _PART), dtype=np.float32)
        np.exp(scores - scores.max(), out=weights.reshape(-1)[: scores.size])
        part = _place(weights.sum(axis=1), stream.uniform())
        chosen[row] = tokens[part * _PART + _place(weights[part], stream.uniform())]
    return chosen


def _place(weights: np.ndarray, number: float) -> int:
    """Where the cumulative sum of `weights` (n,) passes the share `number`, in [0, 1), of all."""
    sums = np.cumsum(weights, dtype=np.float64)
    # The product is below the whole sum, also when rounded: there is such a place.
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


def drawn_without_replacement(scores: np.ndarray, count: int, stream: Stream) -> np.ndarray:
    """At most `count` different indices of `scores` (N,), each drawn with softmax(scores) of those
    left; only ones with a probability above 0. Takes `count` numbers from the stream."""
    candidates = np.flatnonzero(scores > -np.inf)
    values = scores[candidates].astype(np.float64)
    weights = np.exp(values - values.max())
    chosen: list[int] = []
    for number in [stream.uniform() for _ in range(count)]:
        if weights.sum() < np.finfo(np.float64).tiny:
            break
        place = _place(weights, number)
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
    parts = max(256, 4 * count)
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


Processor = Callable[[Rows, np.ndarray], np.ndarray]


def build_processors(options: GenerationOptions, vocab_size: int) -> list[Processor]:
    """The processors that `options` ask for, those of the caller last."""
    end_ids, suppressed = options.end_ids, as_ids(options.suppress_tokens)
    end_ids, suppressed = end_ids[end_ids < vocab_size], suppressed[suppressed < vocab_size]
    words = [
        np.array(word)
        for word in options.bad_words_ids
        if max(word) < vocab_size and not (len(word) == 1 and word[0] in end_ids)
    ]
    least, shortest = options.min_new_tokens, options.min_length
    allowed, decay = options.prefix_allowed_tokens_fn, options.exponential_decay_length_penalty
    chain: list[Processor] = []
    if options.repetition_penalty != 1:
        chain.append(partial(repetition_penalty, penalty=options.repetition_penalty))
    if options.no_repeat_ngram_size:
        chain.append(partial(no_repeat_ngram, size=options.no_repeat_ngram_size))
    if words:
        chain.append(partial(no_bad_words, words=words))
    if least is not None and end_ids.size:
        chain.append(forbidden(end_ids, lambda rows: rows.lengths - rows.prompt_lengths < least))
    elif shortest and end_ids.size:
        chain.append(forbidden(end_ids, lambda rows: rows.lengths < shortest))
    if allowed is not None:
        chain.append(partial(allowed_tokens, function=allowed, beams=options.num_beams))
    if options.forced_bos_token_id is not None:
        chain.append(forced(options.forced_bos_token_id, lambda rows: rows.lengths == 1))
    if options.forced_eos_token_id is not None:
        last = options.forced_eos_token_id
        chain.append(forced(last, lambda rows: rows.lengths == rows.limits - 1))
    if options.remove_invalid_values:
        chain.append(finite_values)
    if decay is not None and end_ids.size:
        chain.append(partial(length_decay, start=decay[0], factor=decay[1], end_ids=end_ids))
    if suppressed.size:
        chain.append(forbidden(suppressed, lambda rows: rows.lengths > 0))
    return chain + [partial(callers_own, function=each) for each in options.logits_processor]


def repetition_penalty(rows: Rows, scores: np.ndarray, penalty: float) -> np.ndarray:
    """Divide positive and multiply negative scores of tokens that occurred, prompt included, by
    `penalty` (Keskar et al., 2019, arXiv:1909.05858, with the sign case of transformers)."""
    row, column = np.nonzero(np.arange(rows.ids.shape[1]) >= rows.padding[:, None])
    token = rows.ids[row, column]
    # A token that occurs twice is read twice before it is written, so it is penalized once.
    score = scores[row, token]
    scores[row, token] = np.where(score < 0, score * penalty, score / penalty)
    return scores


def no_repeat_ngram(rows: Rows, scores: np.ndarray, size: int) -> np.ndarray:
    """Forbid every token that would end an n-gram which the sequence already holds."""
    width = rows.ids.shape[1]
    if width < size:
        return scores
    windows = sliding_window_view(rows.ids, size, axis=1)
    last_words = rows.ids[:, width + 1 - size :]
    repeats = (windows[..., :-1] == last_words[:, None]).all(axis=-1)
    repeats &= np.arange(windows.shape[1]) >= rows.padding[:, None]
    row, start = np.nonzero(repeats)
    scores[row, windows[row, start, -1]] = -np.inf
    return scores


def no_bad_words(rows: Rows, scores: np.ndarray, words: Sequence[np.ndarray]) -> np.ndarray:
    """Forbid every token that would end one of `words`, (n,) int64 each, in a sequence."""
    for word in words:
        width, before = rows.ids.shape[1], len(word) - 1
        if width >= before:
            found = (rows.ids[:, width - before :] == word[:-1]).all(axis=1)
            scores[found & (rows.lengths >= before), word[-1]] = -np.inf
    return scores


def forbidden(tokens: np.ndarray, when: Callable[[Rows], np.ndarray]) -> Processor:
    """Let none of `tokens` follow the sequences that `when` names."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        scores[np.ix_(when(rows), tokens)] = -np.inf
        return scores

    return process


def allowed_tokens(
    rows: Rows, scores: np.ndarray, function: PrefixFunction, beams: int
) -> np.ndarray:
    """Forbid all but the tokens that the caller's function names. Where the processors before
    forbid all that it allows to all `beams` of a prompt, it wins over them."""
    vocab_size = scores.shape[1]
    allowed = np.zeros(scores.shape, dtype=bool)
    for row, (prompt, padding) in enumerate(zip(rows.prompts, rows.padding, strict=True)):
        tokens = np.asarray(function(int(prompt), rows.ids[row, padding:]), dtype=np.int64)
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise UserError(
                "prefix_allowed_tokens_fn must return at least one token id from 0 to "
                f"{vocab_size - 1}, but for prompt {prompt} it returned {tokens.tolist()!r:.80}"
            )
        allowed[row, tokens] = True
    processed = np.where(allowed, scores, np.float32(-np.inf))
    nothing = np.isneginf(processed.max(axis=1)).reshape(-1, beams).all(axis=1)
    processed[np.repeat(nothing, beams)[:, None] & allowed] = 0
    return processed


def forced(tokens: int | tuple[int, ...], when: Callable[[Rows], np.ndarray]) -> Processor:
    """Let only `tokens` follow the sequences that `when` names."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        found = np.flatnonzero(when(rows))
        scores[found] = -np.inf
        scores[np.ix_(found, as_ids(tokens))] = 0
        return scores

    return process


def finite_values(rows: Rows, scores: np.ndarray) -> np.ndarray:
    """Replace NaN by 0 and infinities by the largest finite numbers of the dtype."""
    return np.nan_to_num(scores, copy=False, nan=0.0)


def length_decay(
    rows: Rows, scores: np.ndarray, start: int, factor: float, end_ids: np.ndarray
) -> np.ndarray:
    """Raise the scores of the end, the more the further a sequence is beyond `start` new tokens."""
    largest = float(np.finfo(np.float32).max)
    beyond = np.maximum(rows.lengths - rows.prompt_lengths - start, 0)[:, None]
    end_scores = scores[:, end_ids]
    # A forbidden end stays forbidden.
    size = np.where(np.isfinite(end_scores), np.abs(end_scores), 0)
    # What overflows, here or in float32, is the largest number: nothing is likelier.
    with np.errstate(over="ignore"):
        gain = size * np.clip(np.float64(factor) ** beyond - 1, -largest, largest)
    scores[:, end_ids] = np.clip(end_scores + gain, None, largest)
    return scores


def callers_own(rows: Rows, scores: np.ndarray, function: LogitsProcessor) -> np.ndarray:
    """A processor of the caller; its result is checked, as an error would show up much later."""
    processed = np.asarray(function(rows.ids, scores))
    if processed.shape != scores.shape:
        raise UserError(
            f"a logits_processor returned the shape {processed.shape} for scores of the shape "
            f"{scores.shape}; it must return scores of the same shape"
        )
    return processed.astype(np.float32, copy=False)


class ScoreChain:
    """All that happens to the model's scores before a token is chosen."""

    def __init__(self, options: GenerationOptions, vocab_size: int) -> None:
        self._processors = build_processors(options, vocab_size)
        self._warpers = build_warpers(options)
        self._options = options

    def processed(self, rows: Rows, scores: np.ndarray) -> np.ndarray:
        """The scores (R, V) float32 of all tokens; may write into `scores`. Raises as
        `check_scores` if tokens are to be drawn."""
        for process in self._processors:
            scores = process(rows, scores)
        if self._options.do_sample:
            check_scores(scores)
            if self._options.temperature != 1:
                scores = temperature(scores, self._options.temperature)
        return scores

    @np.errstate(over="ignore")
    def candidates(self, scores: np.ndarray) -> list[Candidates]:
        """What the warpers leave of each row of processed `scores` (R, V)."""
        every = _every(scores.shape[1])
        found = []
        for row in scores:
            tokens = every
            for warp in self._warpers:
                kept = warp(row)
                tokens, row = kept if tokens is every else tokens[kept], row[kept]
            found.append(Candidates(tokens, row))
        return found

    def __call__(self, rows: Rows, scores: np.ndarray) -> np.ndarray:
        """The scores (R, V) float32 to choose from; may write into `scores`."""
        scores = self.processed(rows, scores)
        return self.warped(scores, self.candidates(scores) if self._warpers else None)

    def warped(self, scores: np.ndarray, candidates: list[Candidates] | None) -> np.ndarray:
        """Processed `scores` (R, V) with -inf for all but `candidates`, normalized if asked."""
        if candidates is not None:
            scores = np.full_like(scores, -np.inf)
            for row, (tokens, values) in zip(scores, candidates, strict=True):
                row[tokens] = values
        return log_softmax(scores) if self._options.renormalize_logits else scores


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log probabilities (R, V) of `scores` (R, V), in their dtype."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


# Told the scores (n,) of a row, it says at which places, rising, are those that stay.
Warper = Callable[[np.ndarray], np.ndarray]


def build_warpers(options: GenerationOptions) -> list[Warper]:
    """The warpers that `options` ask for; none unless tokens are drawn."""
    if not options.do_sample:
        return []
    # Beams need one token to go on with, should the others all be ends of sequences.
    keep = 1 if options.num_beams == 1 else max(2, options.end_ids.size + 1)
    chain: list[Warper] = []
    values = options.top_k, options.top_p, options.min_p, options.typical_p
    for warp, value in zip((top_k, top_p, min_p, typical), values, strict=True):
        # Of a mass, 1 is all.
        if value and not (value == 1 and warp in (top_p, typical)):
            chain.append(partial(warp, value=value, keep=keep))
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


def top_k(row: np.ndarray, value: float, keep: int = 1) -> np.ndarray:
    """Leave the `value` largest scores; all that equal the last of them stay."""
    return largest(row, max(int(value), keep))


def top_p(row: np.ndarray, value: float, keep: int = 1) -> np.ndarray:
    """Leave the fewest likeliest tokens whose probabilities add up to `value`, and all that equal
    the last: nucleus sampling, Holtzman et al., 2020, arXiv:1904.09751."""
    below = row.max() - row
    return _nearest(below, np.exp(-below), value, keep)


def min_p(row: np.ndarray, value: float, keep: int = 1) -> np.ndarray:
    """Leave the tokens that have at least `value` times the likeliest one's probability: min-p
    sampling, Nguyen et al., 2024, arXiv:2407.01082."""
    least = row.max() + np.float32(np.log(value))
    return np.flatnonzero(row >= min(least, row[largest(row, keep)].min()))


def typical(row: np.ndarray, value: float, keep: int = 1) -> np.ndarray:
    """Leave the tokens whose information is nearest to the entropy, with probabilities that add up
    to `value`: locally typical sampling, Meister et al., 2022, arXiv:2202.00666."""
    # Both count from the likeliest token here. What has no probability adds nothing to the
    # entropy: 0 x infinity counts as 0.
    information = row.max() - row
    weights = np.exp(-information)
    share = weights / weights.sum(dtype=np.float64)
    entropy = np.float32((share * np.minimum(information, 1000)).sum())
    return _nearest(np.abs(information - entropy), weights, value, keep)


def _nearest(distance: np.ndarray, weights: np.ndarray, mass: float, keep: int) -> np.ndarray:
    """The places of the least `distance` (n,) float32, 0 or more, with `mass` of all
    `weights` (n,) float32, `keep` at least, and all that are as near as the last."""
    # Such floats are in the order of their bits. The first of these give bins of tokens, and only
    # the bin in which the mass is reached is sorted.
    bins = distance.view(np.int32) >> 17
    sums = np.cumsum(np.bincount(bins, weights))
    wanted = mass * sums[-1]
    last = int(np.searchsorted(sums, wanted))
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(distance[inside])]
    missing = wanted - (sums[last - 1] if last else 0)
    place = np.searchsorted(np.cumsum(weights[inside], dtype=np.float64), missing)
    furthest = distance[inside[min(int(place), inside.size - 1)]]
    if keep > 1:
        furthest = max(furthest, distance[largest(-distance, keep)].max())
    return np.flatnonzero(distance <= furthest)
