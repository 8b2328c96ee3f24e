"""How good the weights are that a run starts with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flow_train.hooks.base import Hook

if TYPE_CHECKING:
    from flow_train.loop import Trainer

logger = logging.getLogger("oneflow_accel")


class InitialValidation(Hook):
    """Validates before the first step, for runs that start with another one's weights, such as
    projected ones. The metric log has it as the validation of step 0; early stopping and the choice
    of the best checkpoint do not count it."""

    def on_fit_start(self, trainer: Trainer) -> None:
        options = trainer.options
        if trainer.position.step > 0 or (options.limit_val == 0 and not options.fast_dev_run):
            return
        accuracy = trainer.evaluate(trainer.data.val)
        trainer.log_now(accuracy.as_logged(), split="val")
        logger.info("before the first step: %s", accuracy)
