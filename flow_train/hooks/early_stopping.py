"""Ends a run that has stopped getting better."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flow_train.hooks.base import Hook
from flow_train.hooks.monitored import Monitored

if TYPE_CHECKING:
    from flow_train.loop import Trainer

logger = logging.getLogger("oneflow_accel")


class EarlyStopping(Hook):
    """Stops after `patience` validations in a row without a value of `monitor` that is better by
    more than `min_delta`; `mode` is "max" where higher is better, or "min"."""

    def __init__(
        self,
        monitor: str = "val/acc",
        mode: str = "max",
        patience: int = 100,
        min_delta: float = 0.0,
    ) -> None:
        self._monitored = Monitored(monitor, mode, "callbacks.early_stopping")
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._waited = 0
        self._trainer: Trainer | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        value = self._monitored.value(metrics)
        if self._best is None or self._monitored.better(value, self._best, self._min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._waited >= self._patience and trainer.may_stop:
            trainer.should_stop = True
            logger.info(
                "stopping early: %s has not been better than %.4f for %d validations",
                self._monitored.monitor,
                self._best,
                self._waited,
            )

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load(self, state: Mapping[str, Any], arrays: object) -> None:
        self._best, self._waited = state["best"], int(state["waited"])
        if self._trainer is not None:
            # A run that had stopped stays stopped, unless it is given more patience.
            self._stop_if_due(self._trainer)
