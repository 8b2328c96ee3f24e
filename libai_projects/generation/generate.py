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
    model: StepModel,
    rows: Rows,
    options: GenerationOptions,
    stopping: Stopping,
    on_token: Callable[[int, int], None],
) -> Generation:
    """All sequences, greedy or drawn. A finished one leaves the batch, so that it costs nothing
    while others go on."""
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
        for number, token in zip(alive, chosen, strict=True):
            on_token(int(number), int(token))
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
    on_token: Callable[[int, int], None] = lambda number, token: None,
) -> Generation:
    """Continue prompts; `options.num_return_sequences` sequences for each.

    Greedy decoding and beam search give the tokens that transformers 5 gives for each prompt by
    itself. In a distributed run every process calls this alike, with a `clock` (seconds, for
    `max_time`) that they agree on.

    `on_token` is told each token as it is chosen, ends of sequences too, and the number of its
    sequence: `i` continues prompt `i // num_return_sequences`. Beam search, which knows its tokens
    only at the end, tells none. Raises UserError for what `sequences.prepare` refuses, more
    sequences than the free memory holds, scores that leave no token, or a wrong shape from a
    caller's function.
    """
    rows = _prepare(model, prompts, options)
    stopping = Stopping(options, model.max_positions, clock)
    if options.num_beams > 1:
        return beam.search(model, rows, options, stopping)
    return decode(model, rows, options, stopping, on_token)


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
