"""Parts of data sets, and what a loader lets others put in: arrangements, finishing touches."""

from __future__ import annotations

import numpy as np
import pytest

from flow_train.data.images import Batch, ImageFolder, ImageLoader, SyntheticImages
from flow_train.data.parts import Subset, split
from flow_train.data.transforms import PlainTransform, TrainTransform


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

    def batches(source, channels_last: bool, workers: int = 0) -> list[Batch]:
        loader = ImageLoader(
            source,
            batch_size=5,
            transform=PlainTransform(),
            train=True,
            channels_last=channels_last,
            workers=workers,
        )
        result = list(loader)
        loader.close()
        return result

    arguments = (23, (4, 6, 3), 3)
    for channels_last in (False, True):
        expected = batches(SyntheticImages(*arguments), channels_last)
        for source in (Many(*arguments), Subset(Many(*arguments), np.arange(23))):
            for workers in (0, 2):
                actual = batches(source, channels_last, workers)
                for a, b in zip(actual, expected, strict=True):
                    np.testing.assert_array_equal(a.images, b.images)
                    np.testing.assert_array_equal(a.indices, b.indices)
    assert Many.calls > 0


def test_finish_is_told_epoch_and_number_also_after_a_resume():
    told = []

    def finish(batch: Batch, epoch: int, number: int) -> Batch:
        told.append((epoch, number))
        return Batch(batch.images + 1, batch.labels, batch.indices)

    options = {"batch_size": 5, "transform": PlainTransform(), "train": True}
    source = SyntheticImages(23, (4, 4, 3), 3)
    loader = ImageLoader(source, finish=finish, **options)
    plain = ImageLoader(source, **options)
    for each in (loader, plain):
        each.set_epoch(2, start_batch=1)
    for a, b in zip(loader, plain, strict=True):
        np.testing.assert_array_equal(a.images, b.images + 1)
    assert told == [(2, 1), (2, 2), (2, 3)]
