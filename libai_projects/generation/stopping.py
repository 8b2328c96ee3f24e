"""When a sequence is finished, and why."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.generation.options import GenerationOptions
from libai_projects.generation.result import FinishReason
from libai_projects.generation.rows import Rows

Clock = Callable[[], float]


class Stopping:
    """The rules of one call of `generate`; its time starts when this is made.

    Args:
        options: the rules.
        max_positions: of the model.
        clock: seconds. In a distributed run all processes must be told the same time, or some stop
            while others wait for them: pass one that asks process 0.
    """

    def __init__(self, options: GenerationOptions, max_positions: int, clock: Clock) -> None:
        self._options = options
        self._max_positions = max_positions
        self._clock = clock
        self._started = clock() if options.max_time is not None else 0.0

    def reasons(self, rows: Rows, scores: np.ndarray | None) -> list[FinishReason | None]:
        """Why each of `rows`, whose last tokens are new, is finished; None where it is not.

        Args:
            rows: R sequences.
            scores: (R, V) float32 that the new tokens were chosen from; None in beam search.

        Raises:
            UserError: a stopping criterion returned something of another shape.
        """
        found: list[FinishReason | None] = [None] * len(rows.ids)
        ended = np.isin(rows.ids[:, -1], self._options.end_ids)
        full = rows.lengths >= rows.limits
        # The model's last place counts as such only where it cuts off what was asked for.
        wanted = rows.prompt_lengths + (self._options.max_new_tokens or 0)
        if self._options.max_new_tokens is None:
            wanted = np.full(len(found), self._options.max_length)
        cut = full & (wanted > self._max_positions)
        stopped = self._criteria(rows, scores)
        late = self._is_late()
        for row in range(len(found)):
            if ended[row]:
                found[row] = "eos"
            elif full[row]:
                found[row] = "positions" if cut[row] else "length"
            elif stopped[row]:
                found[row] = "criterion"
            elif late:
                found[row] = "time"
        return found

    def _is_late(self) -> bool:
        limit = self._options.max_time
        return limit is not None and self._clock() - self._started > limit

    def _criteria(self, rows: Rows, scores: np.ndarray | None) -> np.ndarray:
        count = len(rows.ids)
        stopped = np.zeros(count, dtype=bool)
        for criterion in self._options.stopping_criteria:
            answer = np.asarray(criterion(rows.ids, scores))
            if answer.shape not in ((), (count,)):
                raise UserError(
                    f"a stopping criterion returned the shape {answer.shape}; it must return one "
                    f"bool, or one for each of the {count} sequences"
                )
            stopped |= answer.astype(bool)
        return stopped
