"""The way in, `generate`. Beam search is in `beam`; greedy decoding and sampling are here, token by
token for each sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation import beam
from libai_projects.generation.interface import ModelState, StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.processors import (
    ScoreChain,
    best,
    drawn,
    largest,
    log_softmax,
    streams,
)
from libai_projects.generation.sequences import (
    Clock,
    FinishReason,
    GeneratedSequence,
    Generation,
    Rows,
    Stopping,
    TokenScore,
    prepare,
)

# Bytes that one score takes: the model's float32 and what is made of it on the way to a token.
_SCORE_BYTES = 24


# Told the number of a sequence, its new token and, with `logprobs`, its score; True ends it.
OnToken = Callable[[int, int, "TokenScore | None"], "bool | None"]


class Decoding:
    """Sequences on their way, greedy or drawn: told the logits of what may follow each, it says
    their next tokens and which of them go on. A finished one leaves and costs nothing any more.

    `rows` are the prompts, each continued `num_return_sequences` times; `copies` (sequences,) int64
    says by which prompt, `alive` (R,) int64 are the numbers of those that go on. `sequences` grow.
    """

    def __init__(
        self,
        rows: Rows,
        options: GenerationOptions,
        vocab_size: int,
        stopping: Stopping,
        on_token: OnToken = lambda number, token, score: None,
    ) -> None:
        returns, count = options.num_return_sequences, len(rows.ids)
        self.copies = np.repeat(np.arange(count), returns)
        self.sequences = [
            GeneratedSequence(prompt, list(tokens), len(tokens), "length")
            for prompt, tokens in enumerate(rows.tokens())
            for _ in range(returns)
        ]
        self.alive = np.arange(len(self.sequences))
        self._step_scores: list[list[np.ndarray]] = [[] for _ in self.sequences]
        self._rows = rows.select(self.copies)
        self._options, self._stopping, self._on_token = options, stopping, on_token
        self._streams = streams(options.seed, count, returns)
        self._chain = ScoreChain(options, vocab_size)

    def choose(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose from (R, V) float32 `logits`, which are written into: of the R those that go on,
        (n,) int64, and their tokens, (n,) int64. Raises UserError as `generate`."""
        options = self._options
        token_scores: list[TokenScore | None] = [None] * len(logits)
        likely = log_softmax(logits) if options.logprobs is not None else None
        scores = self._chain.processed(self._rows, logits)
        candidates = self._chain.candidates(scores) if options.do_sample else None
        if candidates is not None:
            chosen = drawn(candidates, [self._streams[number] for number in self.alive])
        else:
            chosen = best(scores)
        if options.output_scores or options.stopping_criteria:
            scores = self._chain.warped(scores, candidates)
        if likely is not None:
            token_scores = [
                _score(row, int(token), options.logprobs or 0)
                for row, token in zip(likely, chosen, strict=True)
            ]
        self._rows = self._rows.append(chosen)
        reasons = self._stopping.reasons(self._rows, scores)
        for row, number in enumerate(self.alive):
            self.sequences[number].tokens.append(int(chosen[row]))
            if options.output_scores:
                self._step_scores[number].append(scores[row].copy())
        for row, number in enumerate(self.alive):
            if self._on_token(int(number), int(chosen[row]), token_scores[row]):
                reasons[row] = "stop"
            if (reason := reasons[row]) is not None:
                sequence = self.sequences[number]
                sequence.finish_reason = reason
                if options.output_scores:
                    sequence.step_scores = np.stack(self._step_scores[number])
        going_on = np.flatnonzero([reason is None for reason in reasons])
        if going_on.size < self.alive.size:
            self.alive, self._rows = self.alive[going_on], self._rows.select(going_on)
        return going_on, chosen[going_on]

    def end(self, reason: FinishReason) -> None:
        """No sequence goes on."""
        for number in self.alive:
            self.sequences[number].finish_reason = reason
        self.alive = self.alive[:0]


def _score(log_probabilities: np.ndarray, token: int, count: int) -> TokenScore:
    top = largest(log_probabilities, count) if count else np.empty(0, dtype=np.int64)
    top = top[np.argsort(-log_probabilities[top], kind="stable")][:count]
    pairs = [(int(each), float(log_probabilities[each])) for each in top]
    return TokenScore(float(log_probabilities[token]), pairs)


def generate(
    model: StepModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    clock: Clock = time.monotonic,
    on_token: OnToken = lambda number, token, score: None,
) -> Generation:
    """Continue prompts; `options.num_return_sequences` sequences for each.

    Greedy decoding and beam search give the tokens that transformers 5 gives for each prompt by
    itself. In a distributed run every process calls this alike, with a `clock` (seconds, for
    `max_time`) that they agree on.

    `on_token` is told each token as it is chosen, ends of sequences too, and the number of its
    sequence: `i` continues prompt `i // num_return_sequences`; with True it ends that sequence.
    Beam search, which knows its tokens only at the end, tells none. Raises UserError for what
    `sequences.prepare` refuses, more sequences than the free memory holds, scores that leave no
    token, a wrong shape from a caller's function, or `stop_strings`, which need a tokenizer.
    """
    if options.stop_strings:
        raise UserError(
            "stop_strings need the texts of tokens, which TextPipeline has: ask it, or end a "
            "sequence by on_token"
        )
    rows = prepared(model, prompts, options)
    stopping = Stopping(options, model.max_positions, clock)
    if options.num_beams > 1:
        return beam.search(model, rows, options, stopping)
    decoding = Decoding(rows, options, model.vocab_size, stopping, on_token)
    state = ModelState(model, len(rows.ids), options.use_cache)
    logits = state.read(rows.tokens())[decoding.copies]
    state.select(decoding.copies)
    while True:
        going_on, tokens = decoding.choose(logits)
        if going_on.size == 0:
            return Generation(decoding.sequences)
        state.select(going_on)
        logits = state.read(tokens[:, None])


def prepared(
    model: StepModel, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> Rows:
    """The prompts side by side; a UserError for what cannot be continued or held in memory."""
    rows = prepare(prompts, options, model.vocab_size, model.max_positions)
    count = len(prompts) * max(options.num_beams, options.num_return_sequences)
    tokens = int(rows.limits.max())
    needed = count * (model.vocab_size * _SCORE_BYTES + tokens * model.bytes_per_token)
    free = model.free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{count} sequences of up to {tokens} tokens at once need some "
            f"{needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free; ask for "
            "fewer (num_return_sequences, num_beams, prompts at once) or for shorter ones"
        )
    return rows
