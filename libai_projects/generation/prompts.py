"""Prompts of different lengths as one batch: padding on the left, a mask and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation.options import GenerationOptions


@dataclass(frozen=True)
class PaddedPrompts:
    """B prompts, the longest of T tokens: `ids` and `positions` (B, T) int64, counted from a
    prompt's own first token, 0 at padding; `padding` (B,) int64, columns before each prompt."""

    ids: np.ndarray
    positions: np.ndarray
    padding: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64, tokens of each prompt."""
        return self.ids.shape[1] - self.padding


def pad_left(prompts: Sequence[np.ndarray], pad_token_id: int) -> PaddedPrompts:
    """Put prompts, (n,) int64 each, side by side so that all end in the last column."""
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    width = int(lengths.max())
    ids = np.full((len(prompts), width), pad_token_id, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    padding = width - lengths
    positions = np.maximum(np.arange(width) - padding[:, None], 0)
    return PaddedPrompts(ids, positions, padding)


def visible(padding: np.ndarray, width: int) -> np.ndarray | None:
    """The mask (B, width) bool of `StepModel.step`; None where no row has padding."""
    if not padding.any():
        return None
    return np.arange(width) >= padding[:, None]


def prepare(
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    vocab_size: int,
    max_positions: int,
) -> tuple[PaddedPrompts, np.ndarray]:
    """Check prompts and options against the model (UserError); the batch, and the longest length
    (B,) int64 of each sequence by `max_new_tokens` or `max_length` and the model's positions."""
    if len(prompts) == 0:
        raise UserError("there is no prompt to continue")
    _check_ids(options, vocab_size)
    if isinstance(options.seed, tuple) and len(options.seed) != len(prompts):
        raise UserError(f"{len(options.seed)} seeds were given for {len(prompts)} prompts")
    rows = [_tokens(number, prompt, options, vocab_size) for number, prompt in enumerate(prompts)]
    padded = pad_left(rows, options.pad_token_id)
    if options.max_new_tokens is not None:
        limits = padded.lengths + options.max_new_tokens
    else:
        limits = np.full(len(prompts), options.max_length, dtype=np.int64)
    limits = np.minimum(limits, max_positions)
    for number, (length, limit) in enumerate(zip(padded.lengths, limits, strict=True)):
        if length >= max_positions:
            raise UserError(
                f"prompt {number} has {length} tokens and the model has {max_positions} positions, "
                "so no token can follow; shorten the prompt"
            )
        if length >= limit:
            raise UserError(
                f"prompt {number} has {length} tokens, but max_length, which counts the prompt, is "
                f"{limit}; raise max_length, or set max_new_tokens"
            )
    return padded, limits


def _tokens(
    number: int, prompt: Sequence[int], options: GenerationOptions, vocab_size: int
) -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        if options.bos_token_id is None:
            raise UserError(f"prompt {number} is empty and bos_token_id is null")
        tokens = np.array([options.bos_token_id], dtype=np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"prompt {number} is not a list of token ids: {prompt!r:.80}")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise UserError(
            f"prompt {number} holds the token id {outside[0]}; the model's vocabulary has the ids "
            f"0 to {vocab_size - 1}: is this the tokenizer that the model was trained with?"
        )
    return tokens.astype(np.int64)


def _check_ids(options: GenerationOptions, vocab_size: int) -> None:
    """Ids that are fed to the model must be in the vocabulary. `eos_token_id` need not be: one that
    the model cannot produce ends nothing."""
    for name in ("pad_token_id", "forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(options, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and item >= vocab_size:
                raise UserError(
                    f"{name} is {item}, but the model's vocabulary has {vocab_size} tokens"
                )
