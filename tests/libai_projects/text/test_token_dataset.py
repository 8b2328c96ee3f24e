"""Token datasets: the same bytes as libai writes, read as libai reads, checked when opened."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import oneflow as flow
import pytest
from libai.data.data_utils import indexed_dataset as libai

from libai_projects.text.indexed_dataset import (
    DTYPES,
    DatasetWriter,
    MMapTokenDataset,
    dtype_for_vocabulary,
    get_indexed_dataset,
)
from libai_projects.text.loaders import GPT2Dataset

# Documents of one and of several sequences.
Documents = list[list[list[int]]]
DOCUMENTS: Documents = [[[5, 6, 7]], [[8], [9, 10]], [[299] * 40], [[1, 2]]]


def write_with_libai(prefix: Path, documents: Documents, dtype: type = np.uint16) -> None:
    builder = libai.MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(flow.tensor(sequence, dtype=flow.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write(prefix: Path, documents: Documents, dtype: np.dtype = DTYPES[8]) -> None:
    with DatasetWriter(prefix, dtype) as writer:
        for document in documents:
            sizes = np.array([len(sequence) for sequence in document])
            writer.add(np.concatenate(document), sizes, np.array([len(document)]))
        writer.commit()


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_bytes_are_those_of_libai(tmp_path: Path, dtype: type) -> None:
    documents = [[[i % 256 for i in s] for s in document] for document in DOCUMENTS]
    write_with_libai(tmp_path / "theirs", documents, dtype)
    write(tmp_path / "ours", documents, np.dtype(dtype))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_reads_what_libai_writes(tmp_path: Path) -> None:
    write_with_libai(tmp_path / "data", DOCUMENTS)
    dataset = get_indexed_dataset(str(tmp_path / "data"), "infer", vocab_size=300)
    theirs = libai.MMapIndexedDataset(str(tmp_path / "data"), skip_warmup=True)
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert [list(ids) for ids in dataset] == sequences
    assert [list(theirs[i]) for i in range(len(theirs))] == sequences
    assert (dataset.sizes == theirs.sizes).all()
    assert (dataset.doc_idx == theirs.doc_idx).all()
    assert dataset.doc_idx.tolist() == [0, 1, 3, 4, 5]
    assert dataset.sizes.dtype == theirs.sizes.dtype
    assert dataset.doc_idx.dtype == theirs.doc_idx.dtype
    assert [list(ids) for ids in dataset[1:4]] == sequences[1:4]
    assert dataset.get(3, offset=38).tolist() == theirs.get(3, offset=38).tolist() == [299, 299]
    assert dataset.get(0, length=2).tolist() == [5, 6]
    assert dataset.tokens == sum(map(len, sequences))
    assert not dataset[0].flags.writeable


def test_the_older_format_is_read_through_libai(tmp_path: Path) -> None:
    builder = libai.make_builder(str(tmp_path / "old.bin"), "cached")
    builder.add_item(flow.tensor([1, 2, 3], dtype=flow.int32))
    builder.end_document()
    builder.finalize(str(tmp_path / "old.idx"))
    with pytest.raises(DataError, match=r"lazy or cached, not mmap. Open it with data_impl"):
        MMapTokenDataset(tmp_path / "old")
    lazy = get_indexed_dataset(str(tmp_path / "old"), "lazy")
    assert lazy[0].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="'quick' is none of mmap"):
        get_indexed_dataset(str(tmp_path / "old"), "quick")


def test_blocks_for_training_are_the_same_through_both_readers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [[random.integers(0, 300, n).tolist()] for n in random.integers(1, 40, 50)]
    write(tmp_path / "ours", documents)
    write_with_libai(tmp_path / "theirs", documents)
    sets = []
    for prefix, function in (
        (tmp_path / "ours", get_indexed_dataset),
        (tmp_path / "theirs", libai.get_indexed_dataset),
    ):
        indexed = function(str(prefix), "mmap", skip_warmup=False)
        sets.append(GPT2Dataset(None, str(prefix), indexed, max_seq_length=16))
    ours, theirs = sets
    stream = np.concatenate([document[0] for document in documents])
    assert len(ours) == len(theirs) > 20
    for number in range(len(ours)):
        sample, other = ours[number], theirs[number]
        ids = sample.get("input_ids").tensor.numpy()
        assert (ids == other.get("input_ids").tensor.numpy()).all()
        assert (ids == stream[16 * number : 16 * number + 16]).all()
        labels = sample.get("labels").tensor.numpy()
        assert (labels == stream[16 * number + 1 : 16 * number + 17]).all()


def test_pickled_and_forked_readers_read_on(tmp_path: Path) -> None:
    write(tmp_path / "data.v1", DOCUMENTS)
    dataset = MMapTokenDataset(tmp_path / "data.v1", vocab_size=300)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    assert pickle.loads(pickled)[2].tolist() == [9, 10]
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset[2].tolist() == [9, 10] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # Whoever has the old dataset open keeps it when a new one takes its place.
    with DatasetWriter(tmp_path / "data.v1", DTYPES[8], overwrite=True) as writer:
        writer.add(np.array([77]), np.array([1]), np.array([1]))
        writer.commit()
    assert dataset[2].tolist() == [9, 10]
    assert len(MMapTokenDataset(tmp_path / "data.v1")) == 1


def test_positions_outside_are_index_errors(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    dataset = MMapTokenDataset(tmp_path / "data")
    for arguments in [(5,), (-1,), (0, 4), (0, 1, 3), (0, -1)]:
        with pytest.raises(IndexError, match=r"data: (no sequence|sequence 0 has 3 tokens)"):
            dataset.get(*arguments)


def test_an_empty_dataset_is_read(tmp_path: Path) -> None:
    write(tmp_path / "none", [])
    dataset = MMapTokenDataset(tmp_path / "none", vocab_size=300)
    assert (len(dataset), dataset.tokens, dataset.doc_idx.tolist()) == (0, 0, [0])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "<u2"), (65500, "<i4"), (None, "<i4")])
def test_dtype_is_what_libai_takes(vocab_size: int | None, dtype: str, tmp_path: Path) -> None:
    assert dtype_for_vocabulary(vocab_size) == np.dtype(dtype)
    builder = libai.make_builder(str(tmp_path / "x.bin"), "mmap", vocab_size)
    assert np.dtype(builder._dtype) == np.dtype(dtype)


def _patch(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:offset] + data + old[offset + len(data) :]


# Of DOCUMENTS: 34 bytes of header, 5 sizes, 5 pointers, 5 document marks.
SIZES_AT, POINTERS_AT, MARKS_AT = 34, 34 + 20, 34 + 20 + 40
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "magic": ("idx", _patch(0, b"PK\x03\x04"), "begins with b'PK.*not b'MMIDIDX"),
    "header cut": ("idx", lambda old: old[:20], "truncated: 20 bytes"),
    "version": ("idx", _patch(9, struct.pack("<Q", 2)), "version 2 of the format"),
    "dtype": ("idx", _patch(17, b"\x63"), "dtype code 99"),
    "index cut": ("idx", lambda old: old[:-8], "truncated: 126 bytes, and its header counts 134"),
    "floats": ("idx", _patch(17, b"\x06"), "dtype code 6, which is not for token ids"),
    "index long": ("idx", lambda old: old + b"\0", "damaged: 135 bytes, and its header counts 134"),
    "count": (
        "idx",
        _patch(18, struct.pack("<Q", 2**60)),
        "truncated: 134 bytes, and its header counts",
    ),
    "negative": ("idx", _patch(SIZES_AT + 4, struct.pack("<i", -1)), "sequence 1 has -1 tokens"),
    "pointer": (
        "idx",
        _patch(POINTERS_AT + 8, struct.pack("<q", 0)),
        "sequence 1 begins at byte 0",
    ),
    "first mark": ("idx", _patch(MARKS_AT, struct.pack("<q", 1)), "5 document marks do not run"),
    "mark order": (
        "idx",
        _patch(MARKS_AT + 8, struct.pack("<q", 4)),
        "5 document marks do not run",
    ),
    "last mark": (
        "idx",
        _patch(MARKS_AT + 32, struct.pack("<q", 9)),
        "5 document marks do not run",
    ),
    "data cut": (
        "bin",
        lambda old: old[:-2],
        "truncated: 94 bytes, and .* counts 96",
    ),
    "data long": ("bin", lambda old: old + old, "too long, or of another dataset: 192 bytes"),
    "ids": (
        "bin",
        _patch(8, b"\xff\xff"),
        "has the id 65535 in sequence 2, .* ends at 299",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_dataset_is_an_error_when_opened(case: str, tmp_path: Path) -> None:
    suffix, change, message = DAMAGED[case]
    write(tmp_path / "data", DOCUMENTS)
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        MMapTokenDataset(tmp_path / "data", vocab_size=300)
    assert str(path) in str(caught.value)
    assert "Make the dataset again: `python projects/MagicPrompt/prepare.py" in str(caught.value)


@pytest.mark.parametrize("missing", ["idx", "bin"])
def test_half_a_dataset_is_an_error(missing: str, tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    (tmp_path / f"data.{missing}").unlink()
    with pytest.raises(DataError, match=rf"data.{missing} does not exist, though .*Make the data"):
        MMapTokenDataset(tmp_path / "data")


def test_a_wrong_prefix_names_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    with pytest.raises(DataError, match=r"no dataset at .*date.*there is .*/data. Make it with"):
        MMapTokenDataset(tmp_path / "date")
    with pytest.raises(DataError, match=r"A prefix has no suffix: .*/data\."):
        get_indexed_dataset(str(tmp_path / "data.bin"))
