"""What generation asks of a language model; nothing else about the model is known here."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# Opaque to generation: only the model that made it looks inside.
Cache = Any


class StepModel(Protocol):
    """A decoder that reads tokens step by step.

    In a distributed run every process makes the same calls with the same arguments and gets the
    same logits.

    Attributes:
        vocab_size: real vocabulary; rows added as padding for tensor parallelism are not in it.
        max_positions: longest sequence that the model has positions for.
        bytes_per_token: of the machine's memory that the cache takes for each token of a sequence;
            0 where a device keeps it.
    """

    vocab_size: int
    max_positions: int
    bytes_per_token: int

    def start(self, batch_size: int, use_cache: bool = True) -> Cache:
        """A cache of `batch_size` empty sequences. With `use_cache=False` it keeps the token ids
        only, and each step computes all positions again."""
        ...

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Cache
    ) -> np.ndarray:
        """Read the next tokens of each sequence.

        Args:
            ids: (B, T) int64, the tokens since the last call.
            positions: (B, T) int64, the position of each; 0 where it is padding.
            mask: (B, length so far, these T included) bool, True where a token may be seen, False
                where it is left padding; None where there is no padding. With padding, the length
                may exceed `max_positions`; positions do not.
            cache: what `start` returned; extended in place.

        Returns:
            (B, vocab_size) float32, the logits at the last of the T tokens.
        """
        ...

    def select(self, cache: Cache, rows: np.ndarray) -> None:
        """Make row `rows[i]` of the cache its new row i: drops, reorders and repeats sequences.

        Args:
            cache: what `start` returned; changed in place.
            rows: (new batch size,) int64.
        """
        ...
