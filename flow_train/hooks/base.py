"""What a hook may do, and when the trainer calls it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from oneflow import nn

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class Hook:
    """Does nothing at any time; a subclass overrides what it needs.

    Every process calls all hooks at the same moments. Values for the next log line go to
    `trainer.log`; a step is a log step if `trainer.is_log_step` says so.
    """

    def outlook(self, trainer: Trainer) -> str:
        """What the hook will change in the run, for the line that it begins with; "" for
        nothing."""
        return ""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step; a resumed run has its state by now."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Before the epoch's first batch is waited for."""

    def on_step_start(self, trainer: Trainer) -> None:
        """The step's images are here."""

    def before_update(self, trainer: Trainer) -> None:
        """Before the parameters are updated: `trainer.train_step.gradients()` are the step's, not
        clipped yet. Under nn.Graph asking for them costs a forward and a backward pass."""

    def on_step_end(self, trainer: Trainer) -> None:
        """The parameters have been updated and `trainer.position` counts the step."""

    def evaluation_weights(
        self, trainer: Trainer, model: nn.Module
    ) -> AbstractContextManager[None]:
        """Entered around each evaluation: may give `model` other weights meanwhile."""
        return nullcontext()

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Before validation or test."""

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """`metrics` as "val/loss", "val/acc" and "val/acctop5", the latter two in percent."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After validation; `trainer.position` is at the next epoch's beginning."""

    def on_interrupt(self, trainer: Trainer) -> None:
        """The run stops between two steps: it was told to, or has done its steps."""

    def on_model_replaced(self, trainer: Trainer, arrays: Mapping[str, np.ndarray]) -> None:
        """`trainer.model` is another module now; `arrays` is what the hook's `arrays` would give
        for it."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last step and validation."""

    def state(self) -> dict[str, Any]:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for the checkpoint, by names of the hook's own. A collective call."""
        return {}

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` gave, and from the checkpoint's arrays, which are those of all
        hooks and of the optimizer. Called after `on_fit_start`."""
