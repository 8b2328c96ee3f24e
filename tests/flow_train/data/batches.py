"""What loaders give, taken and compared."""

from __future__ import annotations

import numpy as np

from flow_train.data.images import Batch, ImageLoader


def epoch(loader: ImageLoader, number: int = 0, start_batch: int = 0) -> list[Batch]:
    loader.set_epoch(number, start_batch)
    batches = list(loader)
    loader.close()
    return batches


def assert_same(actual: list[Batch], expected: list[Batch]) -> None:
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.indices, b.indices)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.images, b.images)
