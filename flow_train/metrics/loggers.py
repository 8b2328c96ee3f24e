"""Metrics of a run: JSON lines and TensorBoard always, others where the configuration says so."""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from flow_train.files import replace_file
from flow_train.metrics.log import JSONL_NAME, MetricLog, read_metrics

logger = logging.getLogger("oneflow_accel")


class Logger:
    """A further place for metrics, on the main process."""

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        """One set of values, by name, after `step` optimizer steps."""

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """What is known before training."""

    def close(self) -> None:
        """The run is over."""


CSV_NAME = "metrics.csv"


class CsvTable(Logger):
    """One row per log line: step, split, time, and a column per metric, empty where the line does
    not have it. Written from metrics.jsonl after each validation and at the end, so that a resumed
    run's table is right."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if split in ("val", "test"):
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        source = self._run_dir / JSONL_NAME
        lines = read_metrics(source) if source.exists() else []
        names: dict[str, None] = {}
        for line in lines:
            names.update(dict.fromkeys(line["values"]))
        text = io.StringIO()
        table = csv.DictWriter(text, ["step", "split", "time", *names], lineterminator="\n")
        table.writeheader()
        for line in lines:
            heads = {key: line.get(key) for key in ("step", "split", "time")}
            table.writerow(heads | line["values"])
        replace_file(self._run_dir / CSV_NAME, text.getvalue().encode())


class WandbRun(Logger):
    """Sends metrics to a wandb run, offline unless the configuration says `mode: online`. `options`
    are `wandb.init`'s: project, name, id, group, tags, mode, ... ImportError if wandb is not
    installed."""

    def __init__(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        import wandb

        given = {key: value for key, value in options.items() if value is not None}
        given.pop("_target_", None)
        settings = {"mode": "offline", "name": run_name, "resume": "allow", **given}
        self._run = None
        # Metrics are in metrics.jsonl anyway, so no error of wandb (no network, no account, no
        # disk) may end the run.
        try:
            self._run = wandb.init(dir=str(run_dir), config=dict(config), **settings)
        except Exception as error:
            logger.warning("wandb cannot be used (%s); metrics are in %s", error, run_dir)

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._run is not None:
            named = {f"{split}/{name}": value for name, value in values.items()}
            self._guarded(self._run.log, {**named, "step": step}, step=step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._guarded(self._run.config.update, dict(values), allow_val_change=True)

    def close(self) -> None:
        if self._run is not None:
            self._guarded(self._run.finish)

    def _guarded(self, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            logger.warning("wandb has failed (%s) and is left out from here on", error)
            self._run = None


# tensorboard is always on; its key may be there.
_KINDS = ("csv", "tensorboard", "wandb")


def require_loggers(options: Mapping[str, Any]) -> None:
    """Check that each logger of the configuration's group `logger` (options by key, null for off)
    can log. UserError for an unknown key, or a package that is not installed."""
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
        # A module that was put into sys.modules by hand has no spec.
        return sys.modules.get(package) is not None


class RunLog:
    """All loggers of a run in one. `options` are the configuration's group `logger`; `enabled` is
    False on all processes but the main one, and in trial runs. Errors are those of
    `require_loggers`."""

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
        self._enabled = enabled
        if not enabled:
            return
        if options.get("csv") is not None:
            self._others.append(CsvTable(run_dir))
        if options.get("wandb") is not None:
            self._others.append(WandbRun(run_dir, run_name, config, options["wandb"]))

    def log(
        self, step: int, values: Mapping[str, float | Sequence[float]], *, split: str = "train"
    ) -> None:
        """Write values by name after so many optimizer steps; `split` is "train", "val", "test" or
        another heading."""
        self._metrics.log(step, values, split=split)
        numbers = {k: float(v) for k, v in values.items() if not isinstance(v, Sequence)}
        for other in self._others:
            other.log(step, numbers, split)

    def hyperparameters(self, values: Mapping[str, float]) -> None:
        """What is known before training, such as the number of parameters."""
        for other in self._others:
            other.hyperparameters(values)

    def has(self, step: int, split: str) -> bool:
        """Whether something was logged under a heading at a step; the same on every process."""
        lines = read_metrics(self._metrics.path) if self._enabled else []
        found = any(line["split"] == split and line["step"] == step for line in lines)
        return bool(distributed.all_gather_json(found)[0])

    def truncate(self, step: int) -> None:
        """Forget what was logged after `step`: the run resumes from there."""
        self._metrics.truncate(step)

    def close(self) -> None:
        self._metrics.close()
        for other in self._others:
            other.close()
        self._others = []
