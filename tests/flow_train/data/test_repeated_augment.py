"""Repeated augmentation: the order of timm's sampler, each repetition augmented anew."""

from __future__ import annotations

import numpy as np
import pytest

from flow_train.data.image_reader import RepeatedAugmentation
from flow_train.data.images import ImageLoader, SyntheticImages
from flow_train.data.transforms import Transform


class Noise(SyntheticImages):
    """Images that are nothing but the draws of their augmentation."""

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        return rng.random((2, 2, 3), dtype=np.float32)


def loader(rank: int = 0, world_size: int = 1, batch_size: int = 6, workers: int = 0):
    return ImageLoader(
        Noise(26, (2, 2, 3), 5),
        batch_size=batch_size // world_size,
        transform=lambda image, rng: np.zeros((2, 2, 3), np.float32),
        train=True,
        rank=rank,
        world_size=world_size,
        workers=workers,
        arrangement=RepeatedAugmentation(3),
    )


def sampler_of_deit(permutation: np.ndarray, repeats: int, rank: int, world_size: int) -> list[int]:
    """As the paper's authors arrange it: all repetitions in a row, dealt out one by one."""
    row = [int(index) for index in permutation for _ in range(repeats)]
    return row[rank::world_size]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_order(world_size, repeats):
    permutation = np.random.default_rng(0).permutation(50)
    for rank in range(world_size):
        indices, repetitions = RepeatedAugmentation(repeats)(permutation, 4, rank, world_size)
        expected = sampler_of_deit(permutation, repeats, rank, world_size)
        assert len(indices) == 50 // (4 * world_size) * 4
        assert indices.tolist() == expected[: len(indices)]
        assert set(repetitions.tolist()) <= set(range(repeats))
    # An image and its repetition come once over all processes.
    pairs = [
        pair
        for rank in range(world_size)
        for pair in zip(
            *RepeatedAugmentation(repeats)(permutation, 4, rank, world_size), strict=True
        )
    ]
    assert len(set(pairs)) == len(pairs)


def test_batches_hold_repetitions_that_differ():
    first = next(iter(loader()))
    indices = first.indices
    assert indices.tolist() == [indices[0]] * 3 + [indices[3]] * 3
    images = first.images.reshape(6, -1)
    assert len({row.tobytes() for row in images}) == 6
    assert first.labels.tolist() == [first.labels[0]] * 3 + [first.labels[3]] * 3


def test_workers_world_size_and_resume_change_nothing():
    whole = list(loader())
    assert len(whole) == len(loader()) == 4
    with_workers = loader(workers=2)
    for a, b in zip(whole, with_workers, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
    with_workers.close()
    resumed = loader()
    resumed.set_epoch(0, start_batch=2)
    for a, b in zip(whole[2:], resumed, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
    shards = [list(loader(rank, 2)) for rank in range(2)]
    for number, a in enumerate(whole):
        together = np.stack([shards[0][number].images, shards[1][number].images], axis=1)
        np.testing.assert_array_equal(together.reshape(a.images.shape), a.images)


def test_fewer_than_one_is_an_error():
    with pytest.raises(ValueError, match="0 repetitions"):
        RepeatedAugmentation(0)
