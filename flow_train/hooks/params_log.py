"""How many parameters the model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flow_train.hooks.base import Hook
from flow_train.metrics.macs import count_parameters

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class ParamsLog(Hook):
    """Logs `params_total`, `params_trainable` and `params_not_trainable` when a run begins, and
    again when its layers have become dense.

    Args:
        total_params_log: log the first.
        trainable_params_log: log the second.
        non_trainable_params_log: log the third.
    """

    def __init__(
        self,
        total_params_log: bool = True,
        trainable_params_log: bool = True,
        non_trainable_params_log: bool = True,
    ) -> None:
        self._total = total_params_log
        self._trainable = trainable_params_log
        self._fixed = non_trainable_params_log

    def on_fit_start(self, trainer: Trainer) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Trainer, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        count = count_parameters(trainer.model)
        values = {}
        if self._total:
            values["params_total"] = count.total
        if self._trainable:
            values["params_trainable"] = count.trainable
        if self._fixed:
            values["params_not_trainable"] = count.total - count.trainable
        trainer.log_hyperparameters(values)
