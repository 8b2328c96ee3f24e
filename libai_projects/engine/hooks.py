"""What happens after iterations and at the end of a run, besides checkpoints."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oneflow_accel import distributed

from libai.engine import hooks

from flow_train.hooks import Monitored
from flow_train.metrics.profile import ProfileSteps


class EvalHook(hooks.EvalHook):
    """LiBai's, but not after a last step that failed: max_iter is reached when that is done."""

    def after_train(self) -> None:
        if self.trainer.iter >= self.trainer.max_iter:
            self._do_eval()
        # The function holds the trainer, which could then not be freed.
        del self._func


class PeriodicWriter(hooks.PeriodicWriter):
    """Writes once more when the run ends: hooks before it have evaluated then."""

    def after_train(self) -> None:
        for writer in self._writers:
            writer.write()
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
    """Ends the run after evaluations that were no better, or after `minutes` of the run.

    It comes after the hooks that evaluate, write checkpoints and write metrics.
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

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self._period or done >= self.trainer.max_iter:
            return
        reason = self._reason(done) if distributed.is_main() else ""
        # The results are on the main process only.
        self.trainer.ended_early = distributed.all_gather_json(reason)[0]

    def _reason(self, done: int) -> str:
        monitored = self._monitored
        value, at = self.trainer.storage.latest().get(monitored.monitor, (math.nan, -1))
        if at == done:
            self._without += 1
            if monitored.better(monitored.value({monitored.monitor: value}), self._best):
                self._best, self._best_iteration, self._without = value, done, 0
        best = (
            f"the best {monitored.monitor} was {self._best:.6g} after {self._best_iteration} "
            "iterations (model_best)"
        )
        if self._patience is not None and self._without >= self._patience:
            return f"{self._without} evaluations in a row were no better: {best}"
        if self._minutes is not None and time.monotonic() - self._begin >= 60 * self._minutes:
            return f"train.max_minutes={self._minutes:g} are over: {best}"
        return ""
