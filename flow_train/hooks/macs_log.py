"""How many multiply-accumulates one image costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flow_train.hooks.base import Hook
from flow_train.metrics.macs import count_macs

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class MacsLog(Hook):
    """Logs `gmacs`, 10^9 multiply-accumulates per image, structured layers counted as what they
    are, when a run begins and when its layers have become dense."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Trainer, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        channels, *size = trainer.image_shape
        # The local copy: hooks and a forward pass are not for a model of global tensors.
        model = trainer.train_step.evaluated_model()
        trainer.log_hyperparameters({"gmacs": count_macs(model, size, channels) / 1e9})
