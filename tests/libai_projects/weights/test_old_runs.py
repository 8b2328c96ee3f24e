"""Runs of LiBai's form: which checkpoint is the last, what is said of damage, what is read."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from libai_projects.weights import old_runs
from tests.launch import REPOSITORY

# Of a run of one layer with Adam, 8 samples per step, after two of them.
OLD = REPOSITORY / "tests" / "data" / "libai_checkpoints"


def save(directory: Path, iteration: int, *, name: str = "") -> Path:
    """A checkpoint as LiBai writes it, and the pointer to it."""
    folder = directory / (name or f"model_{iteration:07d}")
    array = np.random.default_rng(iteration).normal(size=(4, 3))
    flow.save({"weight": flow.tensor(array)}, folder / "model")
    flow.save({"iteration": iteration}, folder / "trainer")
    (directory / "last_checkpoint").write_text(folder.name)
    return folder


def data_file(folder: Path) -> Path:
    return next((folder / "model").glob("*tensor_*/out"))


def unpacked(kind: str, directory: Path) -> Path:
    """One that this project wrote, with checksums."""
    with tarfile.open(OLD / f"{kind}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    (directory / "last_checkpoint").write_text("model_0000001")
    return directory / "model_0000001"


def test_the_last_one_is_found(tmp_path: Path) -> None:
    assert old_runs.last(tmp_path) is None
    older, newest = save(tmp_path, 9), save(tmp_path, 19)
    assert old_runs.last(tmp_path) == newest
    assert old_runs.numbered(tmp_path) == [older, newest]


@pytest.mark.parametrize("damage", ["cut", "component", "all"])
def test_a_damaged_one_is_named_with_the_newest_intact_one(tmp_path: Path, damage: str) -> None:
    intact, newest = save(tmp_path, 9), save(tmp_path, 19)
    file = data_file(newest)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "component":
        file = newest / "model"
        shutil.rmtree(file)
    else:
        file = newest
        shutil.rmtree(newest)
    with pytest.raises(CheckpointError, match="newest intact") as raised:
        old_runs.last(tmp_path)
    assert str(file) in str(raised.value)
    assert f"is {intact.name}: to resume from it, write its name into" in str(raised.value)
    (tmp_path / "last_checkpoint").write_text(intact.name)
    assert old_runs.last(tmp_path) == intact


@pytest.mark.parametrize("damage", ["flip", "component", "manifest"])
def test_checksums_tell_damage_that_sizes_do_not(tmp_path: Path, damage: str) -> None:
    folder = unpacked("eager", tmp_path)
    old_runs.verify(folder)
    file, message = data_file(folder), "is corrupt"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[5] ^= 1
        file.write_bytes(content)
    elif damage == "manifest":
        file = folder / old_runs.MANIFEST
        file.write_text("{}")
    else:
        file = folder / "trainer" / "pickled_data"
        file.unlink()
        message = "is missing"
    with pytest.raises(CheckpointError, match=f"{file} {message}"):
        old_runs.verify(folder)


def test_none_that_is_intact(tmp_path: Path) -> None:
    data_file(save(tmp_path, 9)).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        old_runs.last(tmp_path)


def test_a_lost_pointer_is_no_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 9)
    (tmp_path / "last_checkpoint").unlink()
    with pytest.raises(CheckpointError, match="last_checkpoint is missing; the newest intact"):
        old_runs.last(tmp_path)


def test_the_end_of_a_run_of_libai_means_the_newest_numbered_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 9)
    save(tmp_path, 0, name="model_final")
    assert old_runs.last(tmp_path) == folder
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="only a numbered checkpoint can be resumed from"):
        old_runs.last(tmp_path)


@pytest.mark.parametrize("name", ["../model_0000009", ""])
def test_the_pointer_cannot_lead_out(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "out", 9)
    save(tmp_path, 9)
    (tmp_path / "out" / "last_checkpoint").write_text(name)
    assert old_runs.last(tmp_path / "out") == folder


@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_a_run_is_read_to_go_on_with(tmp_path: Path, kind: str) -> None:
    folder = unpacked(kind, tmp_path)
    found = old_runs.read(tmp_path, global_batch_size=4)
    assert found is not None
    assert found.folder == folder
    assert (found.state["step"], found.state["seed"]) == (2, 1234)
    assert found.state["train_step"]["consumed_samples"] == 16
    assert found.state["train_step"]["lr_scheduler"]["last_step"] == 2
    assert len(found.state["rng"]) == 1
    # The names of parameters are numbers where LiBai keeps no others.
    names = list(found.model)
    assert set(found.optimizer) == {
        f"{key}/{f'#{number}' if kind == 'eager' else name}"
        for key in ("exp_avg", "exp_avg_sq")
        for number, name in enumerate(names)
    }
    for name, array in found.model.items():
        assert array.dtype == np.float32
        if kind == "graph":
            assert found.optimizer[f"exp_avg/{name}"].shape == array.shape


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    save(tmp_path, 9)
    with pytest.raises(CheckpointError, match="holds no graph, only weights"):
        old_runs.read(tmp_path, 4)
