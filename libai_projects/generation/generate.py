"""The two ways in: `generate` returns everything at the end, `stream` hands out tokens at once.

Beam search is in `beam`; greedy decoding and sampling are here, one token after the other for each
sequence.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation import beam
from libai_projects.generation.interface import ModelState, StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.processors import ScoreChain, best, drawn, streams
from libai_projects.generation.sequences import (
    Clock,
    GeneratedSequence,
    Generation,
    Rows,
    Stopping,
    prepare,
)

# Bytes that one score takes: the model's float32 and what is made of it on the way to a token.
_SCORE_BYTES = 24


def decode(
    model: StepModel, rows: Rows, options: GenerationOptions, stopping: Stopping
) -> Generator[tuple[int, int], None, Generation]:
    """Yields (number of the sequence, token) as tokens are chosen; returns all sequences. A
    finished sequence leaves the batch, so that it costs nothing while others go on."""
    returns = options.num_return_sequences
    count = len(rows.ids)
    sequences = []
    for prompt in np.repeat(np.arange(count), returns):
        tokens = rows.ids[prompt, rows.padding[prompt] :].tolist()
        sequences.append(GeneratedSequence(int(prompt), tokens, len(tokens), "length"))
    row_streams = streams(options.seed, count, returns)
    step_scores: list[list[np.ndarray]] = [[] for _ in sequences]
    chain = ScoreChain(options, model.vocab_size)
    state = ModelState(model, rows, options.use_cache)
    logits = state.read_prompts()
    if returns > 1:
        copies = np.repeat(np.arange(count), returns)
        rows, logits = rows.select(copies), logits[copies]
        state.select(copies)
    alive = np.arange(len(sequences))
    while True:
        scores = chain(rows, logits)
        chosen = (
            drawn(scores, [row_streams[number] for number in alive])
            if options.do_sample
            else best(scores)
        )
        rows = rows.append(chosen)
        reasons = stopping.reasons(rows, scores)
        for row, number in enumerate(alive):
            sequence = sequences[number]
            sequence.tokens.append(int(chosen[row]))
            sequence.finish_reason = reasons[row] or sequence.finish_reason
            if options.output_scores:
                step_scores[number].append(scores[row].copy())
        yield from [(int(number), int(token)) for number, token in zip(alive, chosen, strict=True)]
        going_on = np.flatnonzero([reason is None for reason in reasons])
        if going_on.size == 0:
            if options.output_scores:
                for sequence, kept in zip(sequences, step_scores, strict=True):
                    sequence.step_scores = np.stack(kept)
            return Generation(sequences)
        if going_on.size < alive.size:
            alive, chosen, rows = alive[going_on], chosen[going_on], rows.select(going_on)
            state.select(going_on)
        logits = state.read(chosen)


def generate(
    model: StepModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    clock: Clock = time.monotonic,
) -> Generation:
    """Continue prompts; `options.num_return_sequences` sequences for each.

    Greedy decoding and beam search give the tokens that transformers 5 gives for each prompt by
    itself. In a distributed run every process calls this alike, with a `clock` (seconds, for
    `max_time`) that they agree on. Raises UserError for what `sequences.prepare` refuses, more
    sequences than the free memory holds, scores that leave no token, or a wrong shape from a
    caller's function.
    """
    rows = _prepare(model, prompts, options)
    stopping = Stopping(options, model.max_positions, clock)
    if options.num_beams > 1:
        return beam.search(model, rows, options, stopping)
    tokens = decode(model, rows, options, stopping)
    while True:
        try:
            next(tokens)
        except StopIteration as end:
            return end.value


def stream(
    model: StepModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    clock: Clock = time.monotonic,
) -> Generator[tuple[int, int], None, Generation]:
    """Continue prompts and yield (number of the sequence, token id) as each token is chosen.

    Sequence `i` continues prompt `i // num_return_sequences`; ends of sequences are yielded too,
    and the StopIteration's value is what `generate` returns. Closing the iterator ends the
    generation; in a distributed run all processes must close theirs after the same token. Raises as
    `generate`, at the call, and for beam search, which knows its tokens only at the end.
    """
    if options.num_beams > 1:
        raise UserError(
            "beam search knows its tokens only at the end, so they cannot be streamed; "
            "set num_beams to 1"
        )
    rows = _prepare(model, prompts, options)
    return decode(model, rows, options, Stopping(options, model.max_positions, clock))


def _prepare(
    model: StepModel, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> Rows:
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
