"""Parts of data sets, and what a loader lets others put in: finishing touches, and arrangements in
the order of timm's sampler."""

from __future__ import annotations

import numpy as np
import pytest

from flow_train.data.image_reader import RepeatedAugmentation
from flow_train.data.images import Batch, ImageFolder, ImageLoader, SyntheticImages
from flow_train.data.parts import Subset, split
from flow_train.data.transforms import PlainTransform, TrainTransform, Transform


def test_a_split_keeps_the_shares_of_the_classes():
    data = SyntheticImages(1000, (2, 2, 3), classes=7, seed=1)
    left, out = split(data, 100, seed=5)
    assert (len(left), len(out)) == (900, 100)
    shares = np.bincount(data.labels) / 10
    assert np.abs(np.bincount(out.labels) - shares).max() <= 1
    again = split(data, 100, seed=5)
    other = split(data, 100, seed=6)
    names = [{part.name(i) for i in range(len(part))} for part in (left, out, again[1], other[1])]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 1000
    assert names[1] == names[2]
    assert names[1] != names[3]
    for wrong in (0, 1000, -1):
        with pytest.raises(ValueError, match="of 1000 images"):
            split(data, wrong, seed=0)


def test_a_subset_reads_what_the_whole_reads(image_folder):
    folder = ImageFolder(image_folder)
    part = Subset(folder, np.array([7, 3, 100]))
    assert part.labels.tolist() == folder.labels[[7, 3, 100]].tolist()
    assert part.name(1) == folder.name(3)
    assert part.root == folder.root
    transform = TrainTransform(16)
    assert part.shape(transform) == (16, 16, 3)
    a, b = (
        source.read(index, transform, np.random.default_rng(0))
        for source, index in ((part, 2), (folder, 100))
    )
    np.testing.assert_array_equal(a, b)
    assert part.read_many(np.array([0]), PlainTransform()) is None


def test_read_many_is_used_and_gives_the_same():
    class Many(SyntheticImages):
        calls = 0

        def read_many(self, indices, transform):
            Many.calls += 1
            return np.stack([self.read(int(i), transform, None) for i in indices])

    def batches(source, **options) -> list[Batch]:
        options |= {"batch_size": 5, "transform": PlainTransform(), "train": True}
        loader = ImageLoader(source, **options)
        result = list(loader)
        loader.close()
        return result

    arguments = (23, (4, 6, 3), 3)
    part = Subset(Many(*arguments), np.arange(23))
    for channels_last in (False, True):
        expected = batches(SyntheticImages(*arguments), channels_last=channels_last)
        for source, workers in ((Many(*arguments), 0), (part, 0), (part, 2)):
            actual = batches(source, channels_last=channels_last, workers=workers)
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(a.images, b.images)
                np.testing.assert_array_equal(a.indices, b.indices)
    assert Many.calls > 0


def test_finish_is_told_epoch_and_number_also_after_a_resume():
    told = []
    options = {"batch_size": 5, "transform": PlainTransform(), "train": True}
    options |= {"finish": lambda *given: told.append(given[1:]) or given[0]}
    loader = ImageLoader(SyntheticImages(23, (4, 4, 3), 3), **options)
    loader.set_epoch(2, start_batch=1)
    assert len(list(loader)) == 3
    assert told == [(2, 1), (2, 2), (2, 3)]


class Noise(SyntheticImages):
    """Images that are nothing but the draws of their augmentation."""

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        return rng.random((2, 2, 3), dtype=np.float32)


@pytest.mark.parametrize(("world_size", "repeats"), [(1, 3), (2, 3), (4, 1), (4, 2)])
def test_order(world_size, repeats):
    """As the paper's authors arrange it: all repetitions in a row, dealt out one by one."""
    permutation = np.random.default_rng(0).permutation(50)
    pairs = []
    for rank in range(world_size):
        indices, repetitions = RepeatedAugmentation(repeats)(permutation, 4, rank, world_size)
        expected = np.repeat(permutation, repeats)[rank::world_size]
        assert len(indices) == 50 // (4 * world_size) * 4
        assert indices.tolist() == expected[: len(indices)].tolist()
        assert set(repetitions.tolist()) <= set(range(repeats))
        pairs += zip(indices, repetitions, strict=True)
    # An image and its repetition come once over all processes.
    assert len(set(pairs)) == len(pairs)


def test_batches_hold_repetitions_that_differ():
    loader = ImageLoader(
        Noise(26, (2, 2, 3), 5),
        batch_size=6,
        transform=lambda image, rng: np.zeros((2, 2, 3), np.float32),
        train=True,
        arrangement=RepeatedAugmentation(3),
    )
    assert len(loader) == 4
    first = next(iter(loader))
    for values in (first.indices, first.labels):
        assert values.tolist() == [values[0]] * 3 + [values[3]] * 3
    assert len({row.tobytes() for row in first.images}) == 6


def test_fewer_than_one_is_an_error():
    with pytest.raises(ValueError, match="0 repetitions"):
        RepeatedAugmentation(0)
