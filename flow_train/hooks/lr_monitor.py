"""The learning rate of each parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneflow_accel.errors import UserError

from flow_train.hooks.base import Hook

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class LearningRateMonitor(Hook):
    """Logs `lr-AdamW/pg1`, `lr-AdamW/pg2` ...; `lr` itself is on every log line anyway.

    Args:
        logging_interval: "step" logs with every log line, "epoch" once per epoch.

    Raises:
        UserError: another interval.
    """

    def __init__(self, logging_interval: str = "step") -> None:
        if logging_interval not in ("step", "epoch"):
            raise UserError(
                f"callbacks.learning_rate_monitor.logging_interval is {logging_interval!r}; it can "
                "be step or epoch"
            )
        self._per_step = logging_interval == "step"

    def on_step_end(self, trainer: Trainer) -> None:
        if self._per_step and trainer.is_log_step:
            trainer.log(self._rates(trainer))

    def on_epoch_end(self, trainer: Trainer) -> None:
        if not self._per_step:
            trainer.log_now(self._rates(trainer), split="lr")

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        optimizer = trainer.train_step.optimizer
        name = type(optimizer).__name__
        return {
            f"lr-{name}/pg{number}": trainer.last_lr * group.options.get("lr_scale", 1.0)
            for number, group in enumerate(optimizer.param_groups, start=1)
        }
