"""Where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Logger:
    """A further place for metrics, on the main process."""

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        """One set of values, by name, after `step` optimizer steps."""

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """What is known before training."""

    def close(self) -> None:
        """The run is over."""
