"""The dataset of GPT: its index against LiBai's C++ helper, and blocks."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest
from libai.data.data_utils import helpers

from libai_projects.text import loaders as data
from libai_projects.text.indexed_dataset import get_indexed_dataset
from libai_projects.text.loaders import BlockIndexedDataset, build_sample_idx
from tests.libai_projects.patches.engine_run import write_dataset


def documents(seed: int, count: int, shortest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60000, size=rng.integers(shortest, 40)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 7, 16, 100])
def test_index_is_that_of_libais_helper_and_one_more_sample(seed: int, length: int) -> None:
    sizes = np.array([len(document) for document in documents(seed, 120, 1)], np.int64)
    ours = build_sample_idx(sizes, length)
    theirs = helpers.build_sample_idx(
        np.arange(len(sizes) + 1, dtype=np.int64), sizes, length, int(sizes.sum())
    )
    assert ours.dtype == theirs.dtype == np.int64
    assert np.array_equal(ours[: len(theirs)], theirs)
    assert len(ours) == (sizes.sum() - 1) // length + 1


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


def test_an_index_of_other_data_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "x_16msl_sample_idx.npy"
    for seed in (1, 2):
        parts = documents(seed, 50, 1)
        write_dataset(tmp_path / "x", parts)
        indexed = get_indexed_dataset(str(tmp_path / "x"), "mmap", True)
        dataset = BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
        assert np.array_equal(dataset[3], np.concatenate(parts)[48:65])
        assert np.array_equal(np.load(file), dataset.sample_idx)
    # The dataset has the file mapped into memory.
    file.unlink()
    file.write_bytes(b"no index")
    BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    assert np.array_equal(np.load(file), dataset.sample_idx)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", file.name]


def test_a_folder_that_cannot_be_written_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = documents(1, 50, 1)
    write_dataset(tmp_path / "x", parts)
    indexed = get_indexed_dataset(str(tmp_path / "x"), "mmap", True)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(data, "_save_index", refuse)
    dataset = BlockIndexedDataset(str(tmp_path / "x"), indexed, 16)
    assert np.array_equal(dataset[3], np.concatenate(parts)[48:65])
    assert not (tmp_path / "x_16msl_sample_idx.npy").exists()


@pytest.mark.parametrize(
    ("rank", "local_rank", "shared", "builds"),
    [
        (0, 0, "0", True),
        (1, 1, "0", False),
        (4, 0, "0", True),
        (4, 0, "1", False),
        (0, 0, "1", True),
    ],
)
def test_one_process_of_each_node_writes_the_index_unless_files_are_shared(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, shared: str, builds: bool
) -> None:
    monkeypatch.setenv("IS_SHARED_FILE", shared)
    monkeypatch.setattr(data.flow.env, "get_rank", lambda: rank)
    monkeypatch.setattr(data.dist, "get_local_rank", lambda: local_rank)
    assert data.builds_index_files() is builds


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
