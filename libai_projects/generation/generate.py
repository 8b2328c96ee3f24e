"""The two ways in: `generate` returns everything at the end, `stream` hands out tokens at once."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation import beam
from libai_projects.generation.decode import decode
from libai_projects.generation.interface import StepModel
from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.prompts import PaddedPrompts, prepare
from libai_projects.generation.sequences import Clock, Generation, Stopping

# Bytes that one score takes: the model's float32 and what is made of it on the way to a token.
_SCORE_BYTES = 24


def generate(
    model: StepModel,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    clock: Clock = time.monotonic,
) -> Generation:
    """Continue prompts; `options.num_return_sequences` sequences for each.

    Greedy decoding and beam search give the tokens that transformers 5 gives for each prompt by
    itself. In a distributed run every process calls this alike, with a `clock` (seconds, for
    `max_time`) that they agree on. Raises UserError for what `prompts.prepare` refuses, more
    sequences than the free memory holds, scores that leave no token, or a wrong shape from a
    caller's function.
    """
    padded, limits = _prepare(model, prompts, options)
    stopping = Stopping(options, model.max_positions, clock)
    if options.num_beams > 1:
        return beam.search(model, padded, limits, options, stopping)
    tokens = decode(model, padded, limits, options, stopping)
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
    padded, limits = _prepare(model, prompts, options)
    return decode(model, padded, limits, options, Stopping(options, model.max_positions, clock))


def _prepare(
    model: StepModel, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> tuple[PaddedPrompts, np.ndarray]:
    padded, limits = prepare(prompts, options, model.vocab_size, model.max_positions)
    rows = len(limits) * max(options.num_beams, options.num_return_sequences)
    tokens = int(limits.max())
    needed = rows * (model.vocab_size * _SCORE_BYTES + tokens * model.bytes_per_token)
    free = _free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{rows} sequences of up to {tokens} tokens at once need some {needed / 2**30:.1f} GiB "
            f"of memory, and {free / 2**30:.1f} GiB are free; ask for fewer (num_return_sequences, "
            "num_beams, prompts at once) or for shorter ones"
        )
    return padded, limits


def _free_memory() -> int | None:
    """Bytes that this machine can still give, None where it does not say; Linux promises more than
    it has, and kills the process that uses it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return None
