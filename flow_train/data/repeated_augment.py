"""Repeated augmentation: an image comes several times in a batch, augmented in different ways."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RepeatedAugmentation:
    """The order of a training epoch (Hoffer et al. 2020, arXiv 1901.09335; as in DeiT).

    Each image of the permutation comes `repeats` times in a row, and these go to the processes in
    turn. An epoch has as many global batches as one without repetitions, so it sees a `repeats`-th
    of the images. It is the `arrangement` of an ImageLoader; any world size with the same global
    batch size sees the same global batches.
    """

    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"{self.repeats} repetitions")

    def __call__(
        self, permutation: np.ndarray, batch_size: int, rank: int, world_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        batches = len(permutation) // (batch_size * world_size)
        total = batches * batch_size * world_size
        needed = -(-total // self.repeats)
        indices = np.repeat(permutation[:needed], self.repeats)[:total]
        repetitions = np.tile(np.arange(self.repeats), needed)[:total]
        return indices[rank::world_size], repetitions[rank::world_size]
