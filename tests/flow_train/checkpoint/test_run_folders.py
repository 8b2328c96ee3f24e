"""Whose folder a run may write into: every way to resume, every kind of folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oneflow_accel.errors import CheckpointError

import numpy as np
import pytest

from flow_train.checkpoint.folders import (
    Checkpoint,
    CheckpointManager,
    agreed_checkpoint,
    checkpoint_folder,
    require_no_other_run,
)


def write_run(folder: Path) -> None:
    manager = CheckpointManager(checkpoint_folder(folder))
    for step in (1, 2):
        manager.save(Checkpoint({"weight": np.full(2, step, np.float32)}), step=step, best=True)
    manager.close()
    (folder / "metrics.jsonl").write_text('{"step": 2}\n')


def write_converted(folder: Path) -> None:
    """What `monarch_flow.convert` writes: checkpoints without a folder around them."""
    manager = CheckpointManager(folder)
    manager.save(Checkpoint({}), step=3)
    manager.close()


def write_libai(folder: Path) -> None:
    (folder / "model_0000099" / "model").mkdir(parents=True)


def write_ended(folder: Path) -> None:
    """A run whose checkpoints were taken away when it was done."""
    for name in ("metrics.jsonl", "curves.png"):
        (folder / name).write_text("results")


def write_killed(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def write_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "images").mkdir()


FOLDERS: dict[str, Callable[[Path], None]] = {
    "missing": Path.rmdir,
    "empty": lambda folder: None,
    "files": write_files,
    "killed": write_killed,
    "run": write_run,
    "converted": write_converted,
    "libai": write_libai,
    "ended": write_ended,
}
OTHERS = ("run", "converted", "libai", "ended")
# How a command was told to resume; "there" is the folder that it writes into, "A" another run's.
RESUMES = {
    "none": None,
    "auto": "auto",
    "run-there": "there",
    "step-there": "there/checkpoints/step-00000001",
    "best-there": "there/checkpoints/best",
    "run-A": "A",
    "step-A": "A/checkpoints/step-00000001",
}


@pytest.mark.parametrize(
    ("kind", "resume"),
    [
        (kind, resume)
        for kind in FOLDERS
        for resume in RESUMES
        if kind == "run" or not resume.endswith("-there")
    ],
)
def test_which_folders_a_run_writes_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, resume: str
) -> None:
    """As commands ask it: the checkpoint to go on from, then the folder."""
    monkeypatch.chdir(tmp_path)
    there = Path("there")
    for folder in (there, Path("A")):
        folder.mkdir()
    write_run(Path("A"))
    FOLDERS[kind](there)
    before = content(there)
    resumed = agreed_checkpoint(RESUMES[resume], there)
    goes_on = kind == "run" and resume in ("auto", "run-there", "step-there", "best-there")
    if kind in OTHERS and not goes_on:
        with pytest.raises(CheckpointError, match="there already holds a run") as caught:
            require_no_other_run(there, resumed and resumed.folder)
        assert ("choose that run's folder" in str(caught.value)) == resume.endswith("-A")
    else:
        require_no_other_run(there, resumed and resumed.folder)
    assert content(there) == before


def test_a_link_to_a_run_is_that_run(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_run(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    resumed = agreed_checkpoint(str(tmp_path / "real"), tmp_path / "link")
    require_no_other_run(tmp_path / "link", resumed and resumed.folder)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }
