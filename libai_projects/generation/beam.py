"""Beam search and beam sampling, by the rules of transformers 5.

At each step the best continuations of all beams of a prompt are ranked; those among the first
`num_beams` that end a sequence are kept as finished; the best of the others are the next beams.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from libai_projects.generation.interface import ModelState, StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.processors import (
    ScoreChain,
    Stream,
    check_scores,
    drawn_without_replacement,
    largest,
    log_softmax,
    streams,
)
from libai_projects.generation.sequences import (
    FinishReason,
    GeneratedSequence,
    Generation,
    Rows,
    Stopping,
)

# This log probability marks a beam that must not be chosen while there are others. It
# is finite, so that beams which are all of this kind still have an order.
_NEVER = -1e9


@dataclass(frozen=True)
class _Candidate:
    """A beam with one more token: number of the beam, the token, sum of log probabilities."""

    beam: int
    token: int
    score: float


class _Search:
    """The search for one prompt, the `number`-th with tokens `prompt`; `longest` is the most new
    tokens that the limit allows. The scores of what is finished have the length penalty in them."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        longest: int,
        options: GenerationOptions,
        stream: Stream,
    ) -> None:
        self._number, self._prompt, self._longest = number, prompt, longest
        self._options = options
        self._stream = stream
        # All beams are the prompt at first: only one of them may be continued.
        self.scores = np.array([0.0] + [_NEVER] * (options.num_beams - 1))
        self.finished: list[GeneratedSequence] = []
        self.over = False

    def candidates(self, log_probabilities: np.ndarray) -> list[_Candidate]:
        """The continuations of (beams, V) log probabilities, best first (if sampling, as drawn)."""
        beams, vocab_size = log_probabilities.shape
        totals = (log_probabilities + self.scores[:, None]).ravel()
        check_scores(totals[None])
        # So many that `num_beams` go on even if each beam's best ones are ends of sequences.
        count = min(max(2, 1 + self._options.end_ids.size) * beams, totals.size)
        if self._options.do_sample:
            places = drawn_without_replacement(totals, count, self._stream)
            if places.size < beams:
                others = np.setdiff1d(np.arange(totals.size), places)
                places = np.concatenate([places, others[: beams - places.size]])
        else:
            found = largest(totals, count)
            places = found[np.argsort(-totals[found], kind="stable")][:count]
        return [
            _Candidate(int(place) // vocab_size, int(place) % vocab_size, float(totals[place]))
            for place in places
        ]

    def advance(
        self, candidates: list[_Candidate], reasons: list[FinishReason | None], beams: np.ndarray
    ) -> list[_Candidate]:
        """Keep the candidates that have a reason to be finished and return the next beams; `beams`
        (beams, n) int64 are the new tokens of each beam before this step."""
        options = self._options
        length = beams.shape[1] + 1
        for candidate, reason in list(zip(candidates, reasons, strict=True))[: options.num_beams]:
            if reason is not None:
                score = _penalized(candidate.score, length, options.length_penalty)
                tokens = [*self._prompt, *beams[candidate.beam].tolist(), candidate.token]
                self.finished.append(
                    GeneratedSequence(self._number, tokens, len(self._prompt), reason, score)
                )
        # Stable: of equal ones the older stays.
        self.finished.sort(key=lambda one: -(one.score or 0.0))
        del self.finished[options.num_beams :]

        ranked = [
            _Candidate(one.beam, one.token, one.score + (_NEVER if reason is not None else 0.0))
            for one, reason in zip(candidates, reasons, strict=True)
        ]
        ranked.sort(key=lambda one: -one.score)
        going_on = ranked[: options.num_beams]
        self.scores = np.array([one.score for one in going_on])
        # A search that is over gets no candidates: its prompt leaves the batch.
        self.over = (
            not self._better_is_likely(length)
            or (options.early_stopping is True and self._is_full())
            or all(reason is not None for reason in reasons)
        )
        return going_on

    def _is_full(self) -> bool:
        return len(self.finished) == self._options.num_beams

    def _better_is_likely(self, length: int) -> bool:
        """Whether the best beam could still beat the worst finished sequence."""
        if not self._is_full():
            return True
        penalty = self._options.length_penalty
        if self._options.early_stopping == "never" and penalty > 0:
            length = self._longest
        best = _penalized(float(self.scores[0]), length, penalty)
        return best > (self.finished[-1].score or 0.0)


def _penalized(score: float, length: int, penalty: float) -> float:
    """`score / length ** penalty`; a power beyond float64 is its largest or smallest number."""
    numbers = np.finfo(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        divisor = np.clip(np.float64(length) ** penalty, numbers.tiny, numbers.max)
        return float(score / divisor)


def search(
    model: StepModel, prompts: Rows, options: GenerationOptions, stopping: Stopping
) -> Generation:
    """The `num_return_sequences` best finished sequences of each prompt, best one first."""
    count = options.num_beams
    width = prompts.ids.shape[1]
    numbers = np.arange(len(prompts.ids))
    longest = (prompts.limits - prompts.lengths).tolist()
    row_streams = streams(options.seed, len(numbers), 1)
    searches = [
        _Search(i, tokens, longest[i], options, row_streams[i])
        for i, tokens in enumerate(prompts.tokens())
    ]
    copies = np.repeat(numbers, count)
    score = ScoreChain(options, model.vocab_size)
    state = ModelState(model, len(numbers), options.use_cache)
    logits = state.read(prompts.tokens())[copies]
    state.select(copies)
    rows = prompts.select(copies)
    alive = list(range(len(searches)))
    while True:
        log_probabilities = score(rows, log_softmax(logits))
        sources: list[int] = []  # the row that each next beam continues
        tokens: list[int] = []
        still_alive = []
        offered = [
            searches[number].candidates(log_probabilities[place * count : (place + 1) * count])
            for place, number in enumerate(alive)
        ]
        reasons = _reasons(rows, offered, count, stopping)
        for place, number in enumerate(alive):
            first = place * count
            going_on = searches[number].advance(
                offered[place], reasons[place], rows.ids[first : first + count, width:]
            )
            if not searches[number].over:
                still_alive.append(number)
                sources += [first + one.beam for one in going_on]
                tokens += [one.token for one in going_on]
        if not still_alive:
            best = [one.finished[: options.num_return_sequences] for one in searches]
            return Generation(list(chain.from_iterable(best)))
        alive = still_alive
        chosen, kept = np.array(tokens), np.array(sources)
        rows = rows.select(kept).append(chosen)
        state.select(kept)
        logits = state.read(chosen[:, None])


def _reasons(
    rows: Rows, offered: list[list[_Candidate]], count: int, stopping: Stopping
) -> list[list[FinishReason | None]]:
    """Why each candidate of each prompt is finished, all of them judged at once."""
    flat = [
        (place * count + one.beam, one.token) for place, row in enumerate(offered) for one in row
    ]
    sources, tokens = np.array(flat, dtype=np.int64).T
    found = iter(stopping.reasons(rows.select(sources).append(tokens), None))
    return [[next(found) for _ in row] for row in offered]
