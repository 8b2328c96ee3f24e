"""A validation metric that a hook watches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from oneflow_accel.errors import UserError

# Other names of the metrics.
_ALIASES = {"val/acc1": "val/acc", "val/acc5": "val/acctop5", "val/acc_top5": "val/acctop5"}


class Monitored:
    """The metric `monitor`, better where it is higher ("max") or lower ("min")."""

    def __init__(self, monitor: str, mode: str, key: str) -> None:
        self.monitor = _ALIASES.get(monitor, monitor)
        self.mode = mode
        self._key = key

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric's value, +-infinity for the worst where it is not a number. UserError, which
        lists the metrics, if there is no such one."""
        if self.monitor not in metrics:
            raise UserError(
                f"{self._key}.monitor is {self.monitor!r}; there are {', '.join(sorted(metrics))}"
            )
        value = metrics[self.monitor]
        return self.worst if math.isnan(value) else value

    @property
    def worst(self) -> float:
        return -math.inf if self.mode == "max" else math.inf

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        return value - than > by if self.mode == "max" else than - value > by
