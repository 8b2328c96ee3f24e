"""Greedy decoding and sampling: one token after the other for each sequence."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from libai_projects.generation.draw import Stream, best, drawn, streams
from libai_projects.generation.interface import ModelState, StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.processors import ScoreChain
from libai_projects.generation.prompts import PaddedPrompts
from libai_projects.generation.sequences import (
    FinishReason,
    GeneratedSequence,
    Generation,
    Rows,
    Stopping,
)


@dataclass
class _Sequence:
    """A sequence and what becomes of it."""

    prompt: int
    prompt_tokens: list[int]
    stream: Stream
    new_tokens: list[int] = field(default_factory=list)
    step_scores: list[np.ndarray] = field(default_factory=list)
    reason: FinishReason = "length"

    def result(self, keep_scores: bool) -> GeneratedSequence:
        return GeneratedSequence(
            prompt=self.prompt,
            tokens=self.prompt_tokens + self.new_tokens,
            prompt_length=len(self.prompt_tokens),
            finish_reason=self.reason,
            step_scores=np.stack(self.step_scores) if keep_scores else None,
        )


def decode(
    model: StepModel,
    prompts: PaddedPrompts,
    limits: np.ndarray,
    options: GenerationOptions,
    stopping: Stopping,
) -> Generator[tuple[int, int], None, Generation]:
    """Yields (number of the sequence, token) as tokens are chosen; returns all sequences. A
    finished sequence leaves the batch, so that it costs nothing while others go on."""
    returns = options.num_return_sequences
    rows = Rows(
        ids=prompts.ids,
        padding=prompts.padding,
        prompt_lengths=prompts.lengths,
        limits=limits,
        prompts=np.arange(len(limits)),
    )
    sequences = _sequences(rows, streams(options.seed, len(limits), returns))
    chain = ScoreChain(options, model.vocab_size)
    state = ModelState(model, prompts, options.use_cache)
    logits = state.read_prompts()
    if returns > 1:
        copies = np.repeat(np.arange(len(limits)), returns)
        rows, logits = rows.select(copies), logits[copies]
        state.select(copies)
    alive = np.arange(len(sequences))
    while True:
        scores = chain(rows, logits)
        chosen = (
            drawn(scores, [sequences[number].stream for number in alive])
            if options.do_sample
            else best(scores)
        )
        rows = rows.append(chosen)
        reasons = stopping.reasons(rows, scores)
        for row, number in enumerate(alive):
            sequence = sequences[number]
            sequence.new_tokens.append(int(chosen[row]))
            if options.output_scores:
                sequence.step_scores.append(scores[row].copy())
            sequence.reason = reasons[row] or sequence.reason
        yield from [(int(number), int(token)) for number, token in zip(alive, chosen, strict=True)]
        going_on = np.flatnonzero([reason is None for reason in reasons])
        if going_on.size == 0:
            return Generation([sequence.result(options.output_scores) for sequence in sequences])
        if going_on.size < alive.size:
            alive, chosen, rows = alive[going_on], chosen[going_on], rows.select(going_on)
            state.select(going_on)
        logits = state.read(chosen)


def _sequences(rows: Rows, row_streams: Sequence[Stream]) -> list[_Sequence]:
    """One for each stream, those of one prompt side by side."""
    returns = len(row_streams) // len(rows.ids)
    return [
        _Sequence(
            prompt=number // returns,
            prompt_tokens=rows.ids[number // returns, rows.padding[number // returns] :].tolist(),
            stream=stream,
        )
        for number, stream in enumerate(row_streams)
    ]
