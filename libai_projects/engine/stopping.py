"""Ends a run early: when evaluations stop getting better, or when its time is up."""

from __future__ import annotations

import math
import time

from oneflow_accel import distributed

from libai.engine.hooks import HookBase


class RunEndedEarlyError(BaseException):
    """Leaves LiBai's training loop; no `Exception`, which the loop takes for a failure."""


class EarlyStop(HookBase):
    """Raises RunEndedEarlyError on all processes after an evaluation that is one too many.

    It comes after the hooks that evaluate, write checkpoints and write metrics.

    Args:
        period: iterations between evaluations.
        metric: name of a result, such as "validation/lm_loss_PPL".
        lower_is_better: whether smaller values are better.
        patience: evaluations in a row without a better value; None for no limit.
        minutes: of the whole run, looked at after an evaluation; None for no limit.
    """

    def __init__(
        self,
        period: int,
        metric: str,
        *,
        lower_is_better: bool,
        patience: int | None,
        minutes: float | None,
    ) -> None:
        self._period, self._metric = period, metric
        self._sign = 1.0 if lower_is_better else -1.0
        self._patience, self._minutes = patience, minutes
        self._best, self._best_iteration, self._without = math.inf, 0, 0
        self._begin = time.monotonic()

    def after_step(self) -> None:
        """Look at the evaluation of this step, if there was one."""
        done = self.trainer.iter + 1
        if done % self._period or done >= self.trainer.max_iter:
            return
        reason = self._reason(done) if distributed.is_main() else ""
        # The results are on the main process only.
        reason = distributed.all_gather_json(reason)[0]
        if reason:
            raise RunEndedEarlyError(reason)

    def _reason(self, done: int) -> str:
        value, iteration = self.trainer.storage.latest().get(self._metric, (math.nan, -1))
        if iteration == done:
            if self._sign * value < self._best:
                self._best, self._best_iteration, self._without = self._sign * value, done, 0
            else:
                self._without += 1
        best = (
            f"the best {self._metric} was {self._sign * self._best:.6g} after "
            f"{self._best_iteration} iterations (model_best)"
        )
        if self._patience is not None and self._without >= self._patience:
            return f"{self._without} evaluations in a row were no better: {best}"
        if self._minutes is not None and time.monotonic() - self._begin >= 60 * self._minutes:
            return f"train.max_minutes={self._minutes:g} are over: {best}"
        return ""
