"""Checkpoints of LiBai's form: renamed when whole, known when damaged, kills at any point."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint import libai_files, oneflow_files
from flow_train.files import remove_folder


def save(directory: Path, iteration: int, *, seed: int = 0, name: str = "") -> Path:
    name = name or f"model_{iteration:07d}"
    temporary = libai_files.begin(directory, name)
    array = np.random.default_rng(seed + iteration).normal(size=(4, 3))
    tensor = flow.tensor(array, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    oneflow_files.save({"weight": tensor}, temporary / "model")
    oneflow_files.save({"iteration": iteration}, temporary / "trainer")
    folder = libai_files.commit(temporary, name)
    if libai_files.iteration_of(name) is not None:
        libai_files.tag(directory, name)
    return folder


def data_file(folder: Path) -> Path:
    return next((folder / "model").glob("global_tensor_*/out"))


def test_the_last_one_is_found(tmp_path: Path) -> None:
    assert libai_files.last(tmp_path) is None
    save(tmp_path, 9)
    newest = save(tmp_path, 19)
    save(tmp_path, 20, name="model_best")
    assert libai_files.last(tmp_path) == newest
    assert list(libai_files.numbered(tmp_path)) == [9, 19]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000019"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "component", "all"])
def test_a_damaged_one_is_named_with_the_newest_intact_one(tmp_path: Path, damage: str) -> None:
    intact = save(tmp_path, 9)
    newest = save(tmp_path, 19)
    file = data_file(newest)
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "remove":
        file.unlink()
    elif damage == "component":
        file = newest / "trainer"
        shutil.rmtree(file)
    else:
        file = newest
        shutil.rmtree(newest)
    with pytest.raises(CheckpointError, match="newest intact") as raised:
        libai_files.last(tmp_path)
    assert str(file) in str(raised.value)
    assert f"is {intact.name}: to resume from it, write its name into" in str(raised.value)
    (tmp_path / "last_checkpoint").write_text(intact.name)
    assert libai_files.last(tmp_path) == intact


def test_none_that_is_intact(tmp_path: Path) -> None:
    data_file(save(tmp_path, 9)).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        libai_files.last(tmp_path)


def test_one_that_libai_wrote_is_checked_by_sizes(tmp_path: Path) -> None:
    folder = save(tmp_path, 9)
    (folder / libai_files.MANIFEST).unlink()
    libai_files.verify(folder)
    data_file(folder).write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"out \(3 bytes\) is truncated"):
        libai_files.verify(folder)


def test_one_component_is_checked_without_the_others(tmp_path: Path) -> None:
    folder = save(tmp_path, 9)
    (folder / "trainer" / "pickled_data").write_bytes(b"")
    libai_files.verify(folder, ["model"])
    (folder / libai_files.MANIFEST).unlink()
    libai_files.verify(folder, ["model"])
    data_file(folder).unlink()
    with pytest.raises(CheckpointError, match="out is missing"):
        libai_files.verify(folder, ["model"])


def test_a_lost_pointer_is_no_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 9)
    (tmp_path / "last_checkpoint").unlink()
    with pytest.raises(CheckpointError, match="last_checkpoint is missing; the newest intact"):
        libai_files.last(tmp_path)


def test_the_end_of_a_run_of_libai_means_the_newest_numbered_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 9)
    save(tmp_path, 0, name="model_final")
    (tmp_path / "last_checkpoint").write_text("model_final")
    assert libai_files.last(tmp_path) == folder
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="only a numbered checkpoint can be resumed from"):
        libai_files.last(tmp_path)


@pytest.mark.parametrize("name", ["../model_0000009", "", "model_0000009/model"])
def test_the_pointer_cannot_lead_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    folder = save(tmp_path / "out", 9)
    save(tmp_path, 9)
    (tmp_path / "out" / "last_checkpoint").write_text(name)
    assert libai_files.last(tmp_path / "out") == folder


def test_a_kill_while_writing_leaves_the_old_ones(tmp_path: Path) -> None:
    old = save(tmp_path, 9)
    temporary = libai_files.begin(tmp_path, "model_0000019")
    (temporary / "model").mkdir()
    assert libai_files.last(tmp_path) == old
    assert list(libai_files.numbered(tmp_path)) == [9]
    save(tmp_path, 29)
    assert not temporary.exists()


def test_a_kill_between_the_two_renames_gives_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 9)
    before = data_file(tmp_path / "model_0000009").read_bytes()
    replace = libai_files.os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-") and Path(source).is_dir():
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(libai_files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 9, seed=1)
    monkeypatch.undo()
    assert not (tmp_path / "model_0000009").exists()
    folder = libai_files.last(tmp_path)
    assert folder is not None
    assert data_file(folder).read_bytes() == before


def test_a_failed_write_of_a_name_gives_the_old_one_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_file(save(tmp_path, 9)).read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(libai_files, "publish_folder", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 9, seed=1)
    assert data_file(tmp_path / "model_0000009").read_bytes() == before


def test_a_name_can_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, 9, name="model_best")
    folder = save(tmp_path, 9, seed=1, name="model_best")
    libai_files.verify(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model_best"]


def test_the_list_of_files_is_complete(tmp_path: Path) -> None:
    folder = save(tmp_path, 9)
    listed = json.loads((folder / libai_files.MANIFEST).read_text())["files"]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == present - {libai_files.MANIFEST}


def test_remove(tmp_path: Path) -> None:
    remove_folder(save(tmp_path, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["last_checkpoint"]
