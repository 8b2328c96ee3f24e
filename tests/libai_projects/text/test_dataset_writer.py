"""The dataset writer leaves a whole dataset or none, whatever happens."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import DataError

import numpy as np
import pytest

from libai_projects.text.indexed_dataset import DTYPES, DatasetWriter, MMapTokenDataset
from tests.launch import run_process

ONE = np.array([1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_one(prefix: Path, value: int, overwrite: bool = False) -> None:
    with DatasetWriter(prefix, DTYPES[8], overwrite) as writer:
        writer.add(np.array([value]), ONE, ONE)
        writer.commit()


def test_without_commit_nothing_is_left(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "new" / "data", DTYPES[8]) as writer:
        writer.add(np.array([3]), ONE, ONE)
        assert names(tmp_path / "new") == ["data.bin.part"]
    assert names(tmp_path / "new") == []


def test_a_dataset_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write_one(tmp_path / "data", 1)
    with pytest.raises(DataError, match=r"data.idx and .*data.bin exist already; --overwrite"):
        DatasetWriter(tmp_path / "data", DTYPES[8])
    with DatasetWriter(tmp_path / "data", DTYPES[8], overwrite=True) as writer:
        writer.add(np.array([2]), ONE, ONE)
    assert MMapTokenDataset(tmp_path / "data")[0].tolist() == [1]
    write_one(tmp_path / "data", 2, overwrite=True)
    assert MMapTokenDataset(tmp_path / "data")[0].tolist() == [2]


def test_sample_indices_of_the_old_dataset_go_with_it(tmp_path: Path) -> None:
    write_one(tmp_path / "data", 1)
    others = ["data_b_32msl_sample_idx.npy", "data_notes.npy"]
    for name in ["data_32msl_sample_idx.npy", "data_64msl_0.1ssp_sample_mapping.npy", *others]:
        (tmp_path / name).touch()
    write_one(tmp_path / "data", 2, overwrite=True)
    assert names(tmp_path) == ["data.bin", "data.idx", *others]


def test_two_writers_of_one_dataset_do_not_mix(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", DTYPES[8]) as writer:
        writer.add(np.array([3]), ONE, ONE)
        with pytest.raises(DataError, match=r"another process is writing .*data.bin.part"):
            DatasetWriter(tmp_path / "data", DTYPES[8])
        writer.commit()
    assert MMapTokenDataset(tmp_path / "data")[0].tolist() == [3]


def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", DTYPES[8]) as writer:
        with pytest.raises(ValueError, match="2 ids, 1 by the sizes"):
            writer.add(np.array([1, 2]), ONE, ONE)
        with pytest.raises(ValueError, match="1 sequences, 2 by the documents"):
            writer.add(ONE, ONE, np.array([2]))


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written: (Not a directory|File exists)"):
        DatasetWriter(tmp_path / "file" / "data", DTYPES[8])


# A limit on the size of files stands for a full disk: the write fails in the same place.
FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from libai_projects.text.indexed_dataset import DatasetWriter
from libai_projects.text.indexed_dataset import DTYPES
from oneflow_accel.errors import DataError
prefix, phase = sys.argv[1:]
ids, sizes = np.zeros(1_500_000), np.full(150_000, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000 if phase == "index" else 100_000,) * 2)
count = 40_000 if phase == "index" else 150_000
try:
    with DatasetWriter(prefix, DTYPES[1] if phase == "index" else DTYPES[8], True) as writer:
        writer.add(ids[: 10 * count], sizes[:count], np.ones(count, int))
        writer.commit()
except DataError as error:
    print("DataError", error)
print(sorted(path.name for path in Path(prefix).parent.iterdir()))
"""


@pytest.mark.parametrize("phase", ["data", "index"])
def test_a_full_disk_keeps_the_old_dataset(phase: str, tmp_path: Path) -> None:
    write_one(tmp_path / "data", 5)
    done = run_process(["-c", FULL_DISK, str(tmp_path / "data"), phase])
    assert "cannot be written: File too large. Nothing was changed; check the space" in done.stdout
    assert "['data.bin', 'data.idx']" in done.stdout
    assert MMapTokenDataset(tmp_path / "data")[0].tolist() == [5]
