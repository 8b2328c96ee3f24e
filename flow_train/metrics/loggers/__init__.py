"""Metrics of a run: JSON lines and TensorBoard always, others where the configuration says so."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

from flow_train.metrics.log import MetricLog
from flow_train.metrics.loggers.base import Logger
from flow_train.metrics.loggers.csv_table import CsvTable
from flow_train.metrics.loggers.wandb_run import WandbRun

__all__ = ["CsvTable", "Logger", "RunLog", "WandbRun"]

# tensorboard is always on; its key may be there.
_KINDS = ("csv", "tensorboard", "wandb")


def require_loggers(options: Mapping[str, Any]) -> None:
    """Check that what is asked for can log.

    Args:
        options: the configuration's group `logger`: options by key, null for off.

    Raises:
        UserError: an unknown key, or a package that is not installed.
    """
    for key in options:
        if key not in _KINDS:
            raise UserError(f"there is no logger.{key}; there are {', '.join(_KINDS)}")
    if options.get("wandb") is not None and not _is_installed("wandb"):
        raise UserError(
            "logger.wandb: the package wandb is not installed; pip install wandb, or leave "
            "logger=wandb out: metrics.jsonl is written in any case"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A module that was put into sys.modules by hand.
        return sys.modules.get(package) is not None


class RunLog:
    """All loggers of a run in one.

    Args:
        run_dir: the run's folder.
        options: the configuration's group `logger`: options by key, null for off.
        run_name: for wandb.
        config: the whole configuration, for wandb.
        enabled: False on all processes but the main one, and in trial runs.

    Raises:
        UserError: as `require_loggers`.
    """

    def __init__(
        self,
        run_dir: Path,
        options: Mapping[str, Any],
        *,
        run_name: str,
        config: Mapping[str, Any],
        enabled: bool,
    ) -> None:
        require_loggers(options)
        self._metrics = MetricLog(run_dir, enabled=enabled)
        self._others: list[Logger] = []
        if not enabled:
            return
        if options.get("csv") is not None:
            self._others.append(CsvTable(run_dir))
        if options.get("wandb") is not None:
            self._others.append(WandbRun(run_dir, run_name, config, options["wandb"]))

    def log(
        self, step: int, values: Mapping[str, float | Sequence[float]], *, split: str = "train"
    ) -> None:
        """Write one set of values.

        Args:
            step: number of optimizer steps done.
            values: numbers by name.
            split: "train", "val", "test" or another heading.
        """
        self._metrics.log(step, values, split=split)
        numbers = {k: float(v) for k, v in values.items() if not isinstance(v, Sequence)}
        for other in self._others:
            other.log(step, numbers, split)

    def hyperparameters(self, values: Mapping[str, float]) -> None:
        """What is known before training, such as the number of parameters."""
        for other in self._others:
            other.hyperparameters(values)

    def truncate(self, step: int) -> None:
        """Forget what was logged after `step`: the run resumes from there."""
        self._metrics.truncate(step)

    def close(self) -> None:
        """Close all files."""
        self._metrics.close()
        for other in self._others:
            other.close()
        self._others = []
