"""The loader of arrays in memory."""

from __future__ import annotations

from oneflow_accel import distributed
from oneflow_accel.errors import DataError

import numpy as np
import pytest

from flow_train.data.arrays import ArrayLoader

ARRAYS = {"images": np.arange(14)[:, None], "labels": np.arange(14)}


def loaders(monkeypatch, world: int, batch: int, *, train: bool) -> list[list[np.ndarray]]:
    """The labels of the batches of each process, of the second epoch."""
    found = []
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loader = ArrayLoader(ARRAYS, batch, train=train)
        loader.set_epoch(1)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all((each["images"][:, 0] == each["labels"]).all() for each in batches)
        found.append([each["labels"] for each in batches])
    return found


def test_training_gives_the_same_global_batches_to_any_number_of_processes(monkeypatch) -> None:
    (one,) = loaders(monkeypatch, 1, 4, train=True)
    two = loaders(monkeypatch, 2, 2, train=True)
    assert [each.tolist() for each in one] == [
        np.concatenate(pair).tolist() for pair in zip(*two, strict=True)
    ]
    seen = np.concatenate(one)
    assert len(seen) == len(set(seen)) == 12
    assert seen.tolist() != sorted(seen)


def test_evaluation_takes_each_sample_once(monkeypatch) -> None:
    found = loaders(monkeypatch, 2, 4, train=False)
    assert [len(batches[-1]) for batches in found] == [3, 3]
    assert sorted(np.concatenate([np.concatenate(each) for each in found])) == list(range(14))


def test_begins_within_an_epoch() -> None:
    loader = ArrayLoader(ARRAYS, 4, train=True)
    loader.set_epoch(3)
    whole = [batch["labels"].tolist() for batch in loader]
    loader.set_epoch(3, start_batch=1)
    assert [batch["labels"].tolist() for batch in loader] == whole[1:]


def test_what_makes_no_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"one length .*\[2, 3\]"):
        ArrayLoader({"a": np.zeros(2), "b": np.zeros(3)}, 1, train=True)
    with pytest.raises(DataError, match="2 samples are fewer than a global batch of 4"):
        ArrayLoader({"a": np.zeros(2)}, 4, train=True)
