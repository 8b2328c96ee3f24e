"""What happens after iterations and at the end of a run, besides checkpoints."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oneflow_accel.agree import on_rank_0

from libai.engine import hooks

from flow_train.hooks import Monitored
from flow_train.metrics.profile import ProfileSteps
from libai_projects.engine.checkpoints import evaluates


class EvalHook(hooks.EvalHook):
    """LiBai's, but the last evaluation comes before what else follows the last step."""

    def after_step(self) -> None:
        if evaluates(self.trainer, self._period):
            self._do_eval()

    def after_train(self) -> None:
        # The function holds the trainer, which could then not be freed.
        del self._func


class PeriodicWriter(hooks.PeriodicWriter):
    """Writes once more when the run ends, early perhaps."""

    def write(self) -> None:
        for writer in self._writers:
            writer.write()

    def after_train(self) -> None:
        self.write()
        super().after_train()


class Profile(hooks.HookBase):
    """Profiles the run, see `ProfileSteps`."""

    def __init__(self, steps: int, folder: Path) -> None:
        self._profile = ProfileSteps(steps, folder)

    def before_step(self) -> None:
        self._profile.on_step_start(self._as_ours())

    def after_step(self) -> None:
        self._profile.on_step_end(self._as_ours())

    def _as_ours(self) -> Any:
        """LiBai's trainer by the names of ours."""
        trainer = self.trainer
        step = SimpleNamespace(model=trainer.model, optimizer=trainer.optimizer)
        return SimpleNamespace(train_step=step, backend=trainer.backend)


class EarlyStop(hooks.HookBase):
    """Ends the run after evaluations that were no better, or `minutes` after it was started.

    It comes after the hooks that evaluate and write metrics; checkpoints hold its state.
    """

    def __init__(self, evaluation: Any, minutes: float | None) -> None:
        metric = evaluation.eval_metric
        # A name without a split means the validation split, as for the best model.
        metric = metric if "/" in metric else f"validation/{metric}"
        self._monitored = Monitored(metric, evaluation.eval_mode, "train.evaluation")
        self._period, self._patience = evaluation.eval_period, evaluation.get("patience")
        self._minutes = minutes
        self._best, self._best_iteration, self._without = self._monitored.worst, 0, 0
        self._begin = time.monotonic()

    def state(self) -> list[Any]:
        return [self._best, self._best_iteration, self._without]

    def load(self, state: list[Any] | None) -> None:
        """Go on from what `state` gave; None is that of a run that had no such hook."""
        if state is not None:
            self._best, self._best_iteration, self._without = state

    def before_train(self) -> None:
        # A run that had stopped stays stopped, unless it is given more patience.
        self._end_if_due(self.trainer.start_iter)

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self._period or done >= self.trainer.max_iter:
            return
        monitored = self._monitored
        value, at = self.trainer.storage.latest().get(monitored.monitor, (math.nan, -1))
        if at == done:
            self._without += 1
            if monitored.better(monitored.value({monitored.monitor: value}), self._best):
                self._best, self._best_iteration, self._without = value, done, 0
        self._end_if_due(done)

    def _end_if_due(self, done: int) -> None:
        # The results are on the main process only.
        self.trainer.ended_early = on_rank_0(self._reason) if done else ""

    def _reason(self) -> str:
        best = (
            f"the best {self._monitored.monitor} was {self._best:.6g} after "
            f"{self._best_iteration} iterations (model_best)"
        )
        if self._patience is not None and self._without >= self._patience:
            return f"{self._without} evaluations in a row were no better: {best}"
        if self._minutes is not None and time.monotonic() - self._begin >= 60 * self._minutes:
            return f"train.max_minutes={self._minutes:g} are over: {best}"
        return ""
