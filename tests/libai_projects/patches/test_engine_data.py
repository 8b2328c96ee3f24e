"""The dataset of GPT: its index against LiBai's C++ helper, and blocks."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest
from libai.data.data_utils import helpers

from libai_projects.text.indexed_dataset import get_indexed_dataset
from libai_projects.text.loaders import BlockIndexedDataset
from tests.libai_projects.patches.engine_run import write_dataset


def documents(seed: int, count: int, shortest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60000, size=rng.integers(shortest, 40)) for _ in range(count)]


class Numbers:
    """Sequences of such sizes that count 0, 1, 2, ... from one to the next."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes
        self._parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])

    def __getitem__(self, index: int) -> np.ndarray:
        return self._parts[index]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 7, 16, 100])
def test_blocks_begin_where_libais_helper_says_and_one_more(seed: int, length: int) -> None:
    sizes = np.array([len(document) for document in documents(seed, 120, 1)], np.int64)
    dataset = BlockIndexedDataset("x", Numbers(sizes), length)
    theirs = helpers.build_sample_idx(
        np.arange(len(sizes) + 1, dtype=np.int64), sizes, length, int(sizes.sum())
    )
    begins = np.cumsum(sizes) - sizes
    firsts = [int(dataset[number][0]) for number in range(len(dataset))]
    # A sample of theirs reaches from one row to the next.
    assert firsts[: len(theirs) - 1] == [int(begins[row] + off) for row, off in theirs[:-1]]
    assert len(dataset) == (sizes.sum() - 1) // length


@pytest.mark.parametrize("impl", ["mmap", "infer"])
def test_blocks_hold_the_tokens_in_order(tmp_path: Path, impl: str) -> None:
    parts = documents(1, 50, 0)
    write_dataset(tmp_path / "x", parts)
    indexed = get_indexed_dataset(str(tmp_path / "x"), impl, True)
    dataset = BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    tokens = np.concatenate(parts)
    assert len(dataset) == (len(tokens) - 1) // 16
    for number in range(len(dataset)):
        assert np.array_equal(dataset[number], tokens[number * 16 : number * 16 + 17])


def test_too_little_text_says_how_much_it_takes(tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", [np.arange(16)])
    indexed = get_indexed_dataset(str(tmp_path / "x"), "mmap", True)
    with pytest.raises(DataError, match=r"has 16 tokens, and one sample takes 17"):
        BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    assert len(BlockIndexedDataset(str(tmp_path / "x"), indexed, 15)) == 1


def test_a_wrong_implementation_is_an_error(tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", documents(1, 3, 1))
    with pytest.raises(DataError, match="'mmapp' is none of mmap, infer, lazy, cached"):
        get_indexed_dataset(str(tmp_path / "x"), "mmapp", True)
