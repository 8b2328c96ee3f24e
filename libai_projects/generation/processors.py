"""Changes to the scores of the next token that follow from the sequence so far, and their chain.

Each takes (Rows, scores (R, V) float32) and returns the new scores; it may write into the ones it
was given. Their order is that of transformers, on which the result depends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oneflow_accel.errors import UserError

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from libai_projects.generation.draw import check_scores
from libai_projects.generation.options import (
    GenerationOptions,
    LogitsProcessor,
    PrefixFunction,
    as_ids,
)
from libai_projects.generation.sequences import Rows
from libai_projects.generation.warpers import build_warpers

Processor = Callable[[Rows, np.ndarray], np.ndarray]


def build_processors(options: GenerationOptions, vocab_size: int) -> list[Processor]:
    """The processors that `options` ask for, those of the caller last."""
    end_ids = options.end_ids[options.end_ids < vocab_size]
    chain: list[Processor] = []
    if options.repetition_penalty != 1:
        chain.append(repetition_penalty(options.repetition_penalty))
    if options.no_repeat_ngram_size:
        chain.append(no_repeat_ngram(options.no_repeat_ngram_size))
    words = [
        np.array(word)
        for word in options.bad_words_ids
        if max(word) < vocab_size and not (len(word) == 1 and word[0] in end_ids)
    ]
    if words:
        chain.append(no_bad_words(words))
    if options.min_new_tokens is not None and end_ids.size:
        chain.append(min_new_tokens(options.min_new_tokens, end_ids))
    elif options.min_length and end_ids.size:
        chain.append(min_length(options.min_length, end_ids))
    if options.prefix_allowed_tokens_fn is not None:
        chain.append(allowed_tokens(options.prefix_allowed_tokens_fn, options.num_beams))
    if options.forced_bos_token_id is not None:
        chain.append(forced_first(options.forced_bos_token_id))
    if options.forced_eos_token_id is not None:
        chain.append(forced_last(as_ids(options.forced_eos_token_id)))
    if options.remove_invalid_values:
        chain.append(finite_values)
    if options.exponential_decay_length_penalty is not None and end_ids.size:
        chain.append(length_decay(*options.exponential_decay_length_penalty, end_ids))
    suppressed = as_ids(options.suppress_tokens)
    if (suppressed := suppressed[suppressed < vocab_size]).size:
        chain.append(no_tokens(suppressed))
    chain.extend(callers_own(function) for function in options.logits_processor)
    return chain


def repetition_penalty(penalty: float) -> Processor:
    """Divide positive and multiply negative scores of tokens that occurred, prompt included, by
    `penalty` (Keskar et al., 2019, arXiv:1909.05858, with the sign case of transformers)."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        row, column = np.nonzero(np.arange(rows.ids.shape[1]) >= rows.padding[:, None])
        token = rows.ids[row, column]
        # A token that occurs twice is read twice before it is written, so it is penalized once.
        score = scores[row, token]
        scores[row, token] = np.where(score < 0, score * penalty, score / penalty)
        return scores

    return process


def no_repeat_ngram(size: int) -> Processor:
    """Forbid every token that would end an n-gram which the sequence already holds."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
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

    return process


def no_bad_words(words: Sequence[np.ndarray]) -> Processor:
    """Forbid every token that would end one of `words`, (n,) int64 each, in a sequence."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        for word in words:
            width, before = rows.ids.shape[1], len(word) - 1
            if width >= before:
                found = (rows.ids[:, width - before :] == word[:-1]).all(axis=1)
                scores[found & (rows.lengths >= before), word[-1]] = -np.inf
        return scores

    return process


def no_tokens(tokens: np.ndarray) -> Processor:
    def process(_rows: Rows, scores: np.ndarray) -> np.ndarray:
        scores[:, tokens] = -np.inf
        return scores

    return process


def min_length(length: int, end_ids: np.ndarray) -> Processor:
    """Forbid the end of sequences that are shorter than `length`."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        scores[np.ix_(rows.lengths < length, end_ids)] = -np.inf
        return scores

    return process


def min_new_tokens(count: int, end_ids: np.ndarray) -> Processor:
    """Forbid the end of sequences that have fewer than `count` new tokens."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        scores[np.ix_(rows.lengths - rows.prompt_lengths < count, end_ids)] = -np.inf
        return scores

    return process


def allowed_tokens(function: PrefixFunction, beams: int) -> Processor:
    """Forbid all but the tokens that the caller's function names. Where the processors before
    forbid all that it allows to all `beams` of a prompt, it wins over them."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        vocab_size = scores.shape[1]
        allowed = np.zeros(scores.shape, dtype=bool)
        for row, (prompt, padding) in enumerate(zip(rows.prompts, rows.padding, strict=True)):
            tokens = np.asarray(function(int(prompt), rows.ids[row, padding:]), dtype=np.int64)
            if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
                raise UserError(
                    "prefix_allowed_tokens_fn must return at least one token id from 0 to "
                    f"{vocab_size - 1}, but for prompt {prompt} it returned "
                    f"{tokens.tolist()!r:.80}"
                )
            allowed[row, tokens] = True
        processed = np.where(allowed, scores, np.float32(-np.inf))
        nothing = np.isneginf(processed.max(axis=1)).reshape(-1, beams).all(axis=1)
        processed[np.repeat(nothing, beams)[:, None] & allowed] = 0
        return processed

    return process


def forced_first(token: int) -> Processor:
    """Let only `token` follow a prompt of one token."""
    return _forced(np.array([token]), lambda rows: rows.lengths == 1)


def forced_last(tokens: np.ndarray) -> Processor:
    """Let only `tokens` stand at the last place that the limit allows."""
    return _forced(tokens, lambda rows: rows.lengths == rows.limits - 1)


def _forced(tokens: np.ndarray, when: Callable[[Rows], np.ndarray]) -> Processor:
    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        forced = np.flatnonzero(when(rows))
        scores[forced] = -np.inf
        scores[np.ix_(forced, tokens)] = 0
        return scores

    return process


def finite_values(rows: Rows, scores: np.ndarray) -> np.ndarray:
    """Replace NaN by 0 and infinities by the largest finite numbers of the dtype."""
    return np.nan_to_num(scores, copy=False, nan=0.0)


def length_decay(start: int, factor: float, end_ids: np.ndarray) -> Processor:
    """Raise the scores of the end, the more the further a sequence is beyond `start` new tokens."""
    largest = float(np.finfo(np.float32).max)

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        beyond = np.maximum(rows.lengths - rows.prompt_lengths - start, 0)[:, None]
        end_scores = scores[:, end_ids]
        # A forbidden end stays forbidden.
        size = np.where(np.isfinite(end_scores), np.abs(end_scores), 0)
        # What overflows, here or in float32, is the largest number: nothing is likelier.
        with np.errstate(over="ignore"):
            gain = size * np.clip(np.float64(factor) ** beyond - 1, -largest, largest)
        scores[:, end_ids] = np.clip(end_scores + gain, None, largest)
        return scores

    return process


def callers_own(function: LogitsProcessor) -> Processor:
    """A processor of the caller; its result is checked, as an error would show up much later."""

    def process(rows: Rows, scores: np.ndarray) -> np.ndarray:
        processed = np.asarray(function(rows.ids, scores))
        if processed.shape != scores.shape:
            raise UserError(
                f"a logits_processor returned the shape {processed.shape} for scores of the shape "
                f"{scores.shape}; it must return scores of the same shape"
            )
        return processed.astype(np.float32, copy=False)

    return process


class ScoreChain:
    """All that happens to the model's scores before a token is chosen."""

    def __init__(self, options: GenerationOptions, vocab_size: int) -> None:
        self._processors = build_processors(options, vocab_size)
        self._warpers = build_warpers(options)
        self._renormalize = options.renormalize_logits

    def __call__(self, rows: Rows, scores: np.ndarray) -> np.ndarray:
        """The scores (R, V) float32 to choose from; may write into `scores`."""
        for process in self._processors:
            scores = process(rows, scores)
        if self._warpers:
            check_scores(scores)
        for warp in self._warpers:
            scores = warp(scores)
        return log_softmax(scores) if self._renormalize else scores


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Log probabilities (R, V) of `scores` (R, V), in their dtype."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
