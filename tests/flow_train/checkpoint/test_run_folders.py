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


def files(*names: str) -> Callable[[Path], None]:
    """Writes such files, with their folders; a name that ends with / is a folder."""

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                (folder / name).mkdir()
            else:
                (folder / name).write_text("{}")

    return write


FOLDERS: dict[str, Callable[[Path], None]] = {
    "missing": Path.rmdir,
    "empty": files(),
    "files": files("notes.txt", "images/"),
    "killed": files("checkpoints/", "metrics.jsonl"),
    "run": write_run,
    "converted": write_converted,
    "libai": files("model_0000099/model/"),
    # Checkpoints were taken away when it was done.
    "ended": files("metrics.jsonl", "curves.png"),
}
OTHERS = ("run", "converted", "libai", "ended")
# How a command was told to resume; "there" is the folder that it writes into, "A" another run's.
RESUMES = (
    None,
    "auto",
    "there",
    "there/checkpoints/step-00000001",
    "there/checkpoints/best",
    "A",
    "A/checkpoints/step-00000001",
)


@pytest.mark.parametrize("kind", FOLDERS)
def test_which_folders_a_run_writes_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As commands ask it: the checkpoint to go on from, then the folder."""
    monkeypatch.chdir(tmp_path)
    there = Path("there")
    for folder in (there, Path("A")):
        folder.mkdir()
    write_run(Path("A"))
    FOLDERS[kind](there)
    before = content(there)
    for resume in RESUMES:
        is_there = resume is not None and resume.startswith("there")
        if is_there and kind != "run":
            continue
        resumed = agreed_checkpoint(resume, there)
        if kind in OTHERS and not (kind == "run" and (resume == "auto" or is_there)):
            with pytest.raises(CheckpointError, match="there already holds a run") as caught:
                require_no_other_run(there, resumed and resumed.folder)
            from_other = resume is not None and resume.startswith("A")
            assert ("choose that run's folder" in str(caught.value)) == from_other
        else:
            require_no_other_run(there, resumed and resumed.folder)
    assert content(there) == before


def test_a_link_to_a_run_is_that_run(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    write_run(real)
    link.symlink_to(real)
    resumed = agreed_checkpoint(str(real), link)
    require_no_other_run(link, resumed and resumed.folder)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }
