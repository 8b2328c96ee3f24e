"""Weights & Biases, where it is installed; a run never fails for its sake."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flow_train.metrics.loggers.base import Logger

logger = logging.getLogger("oneflow_accel")


class WandbRun(Logger):
    """Sends metrics to a wandb run, offline unless the configuration says `mode: online`.

    Args:
        run_dir: holds wandb's files.
        run_name: unless the options have a `name`.
        config: of the run, shown beside it.
        options: for `wandb.init`: project, name, id, group, tags, mode, ...

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        import wandb

        given = {key: value for key, value in options.items() if value is not None}
        given.pop("_target_", None)
        settings = {"mode": "offline", "name": run_name, "resume": "allow", **given}
        self._run = None
        # Whatever it is: no network, no account, no disk. The metrics are in metrics.jsonl.
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
