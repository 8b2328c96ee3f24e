"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from oneflow_accel.training.checkpoint import Checkpoint, CheckpointManager, read_checkpoint

AUTO_RESUME = "auto"

logger = logging.getLogger("oneflow_accel")


def checkpoint_folder(output_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return output_dir / "checkpoints"


def checkpoint_to_resume(resume: str | None, output_dir: Path) -> Checkpoint | None:
    """The checkpoint that a user asked to resume from.

    Args:
        resume: a checkpoint's folder, one of several, or a run's (the newest checkpoint); "auto"
            for the newest one of this run; or None.
        output_dir: the run's folder.

    Returns:
        None where nothing was asked for, or "auto" was and there is none yet.

    Raises:
        CheckpointError: the checkpoint named is not there, or none is intact.
    """
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
