"""Which checkpoint a run goes on from, and whose folder it may write into."""

from __future__ import annotations

import logging
from pathlib import Path

from oneflow_accel.errors import CheckpointError

from flow_train.checkpoint import libai_folders
from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, read_checkpoint
from flow_train.metrics.log import JSONL_NAME

AUTO_RESUME = "auto"
# The picture that a run draws when it ends.
CURVES_NAME = "curves.png"

logger = logging.getLogger("oneflow_accel")


def checkpoint_folder(output_dir: Path) -> Path:
    return output_dir / "checkpoints"


def checkpoint_to_resume(resume: str | None, output_dir: Path) -> Checkpoint | None:
    """The checkpoint that a user asked to resume from: its folder, or the newest one in a folder of
    several or of a run; None where none was asked for. "auto" is the newest one in `output_dir`,
    or None. CheckpointError if the one named is not there, or none is intact."""
    if resume is None:
        return None
    if resume != AUTO_RESUME:
        inside = checkpoint_folder(Path(resume))
        return read_checkpoint(inside if inside.is_dir() else resume)
    latest = CheckpointManager(checkpoint_folder(output_dir)).latest()
    if latest is None:
        logger.info("no checkpoint in %s yet: starting from the beginning", output_dir)
        return None
    return read_checkpoint(latest)


def require_model(checkpoint: Checkpoint, name: str, num_classes: int) -> None:
    """Refuse a checkpoint of another model or number of classes: CheckpointError names both."""
    theirs = (checkpoint.name, checkpoint.state.get("num_classes"))
    if theirs != (name, num_classes):
        raise CheckpointError(
            f"the checkpoint is of another model: {theirs[0]} with {theirs[1]} classes, this run "
            f"is {name} with {num_classes}; give the model and the data that it comes from"
        )


def way_on(folder: Path, resume: str) -> str:
    """A sentence without its full stop: what to do after the run in a folder was interrupted."""
    found = sorted(path.name for path in checkpoint_folder(folder).glob("step-*"))
    if not found:
        return f"no checkpoint was written to {folder}"
    return f"the newest checkpoint in {folder} is {found[-1]}: continue with {resume}"


def require_no_other_run(folder: Path, resumed_from: Path | None = None) -> None:
    """Refuse to write into a folder that holds another run: its log would be cut, its checkpoints
    taken for old ones and deleted. CheckpointError names what shows it. A run that goes on from
    `resumed_from`, a checkpoint in this folder, is the same run.

    Every command that trains or writes a checkpoint asks this before it writes anything.
    """
    trace = _trace_of_a_run(folder)
    inside = None if resumed_from is None else folder.resolve() in resumed_from.resolve().parents
    if trace is None or inside:
        return
    if resumed_from is None:
        way_out = "resume from it, or choose another output folder"
    else:
        way_out = f"{resumed_from} is of another run: choose that run's folder, or a new one"
    raise CheckpointError(f"{folder} already holds a run ({trace.relative_to(folder)}); {way_out}")


def _trace_of_a_run(folder: Path) -> Path | None:
    """What shows that there is a run of any of this project's programs."""
    for directory in (checkpoint_folder(folder), folder):
        found = sorted(path for path in directory.glob("step-*") if path.is_dir())
        if found:
            return found[-1]
    numbered = libai_folders.numbered(folder)
    if numbered:
        return list(numbered.values())[-1]
    # A run that has ended, and whose checkpoints were taken away. One that was killed before its
    # first checkpoint has nothing to lose.
    ended = (folder / JSONL_NAME, folder / CURVES_NAME)
    return ended[0] if all(path.exists() for path in ended) else None
