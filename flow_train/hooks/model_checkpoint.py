"""Which moments of a run are kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flow_train.hooks.base import Hook
from flow_train.hooks.monitored import Monitored

if TYPE_CHECKING:
    from flow_train.loop import Trainer


class ModelCheckpoint(Hook):
    """Keeps the newest checkpoint, to resume from, and the `save_top_k` best ones by `monitor`, to
    use. `save_last` writes one at the end of every epoch and when the run is told to stop, so that
    it can be resumed; `every_n_train_steps` (0: off) one every so many steps. Without both only the
    best are written."""

    def __init__(
        self,
        monitor: str = "val/acc",
        mode: str = "max",
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int = 0,
    ) -> None:
        self._monitored = Monitored(monitor, mode, "callbacks.model_checkpoint")
        self.monitor = self._monitored.monitor
        self._top_k = save_top_k
        self._save_last = save_last
        self._every = every_n_train_steps
        # [value, step] of those kept, best first.
        self._kept: list[list[float]] = []
        self._value: float | None = None
        self._on_disk: set[int] = set()

    @property
    def best_value(self) -> float | None:
        return self._kept[0][0] if self._kept else None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._on_disk = trainer.steps_on_disk()

    def on_step_end(self, trainer: Trainer) -> None:
        if self._every and trainer.position.step % self._every == 0:
            trainer.save_checkpoint(keep=self._steps())

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._value = self._monitored.value(metrics)

    def on_epoch_end(self, trainer: Trainer) -> None:
        best = among = False
        if self._value is not None and self._top_k:
            best, among = self._rank(self._value, trainer.position.step)
        self._value = None
        if among or self._save_last:
            trainer.save_checkpoint(best=best, keep=self._steps())

    def on_interrupt(self, trainer: Trainer) -> None:
        if self._save_last:
            trainer.save_checkpoint(keep=self._steps())

    def state(self) -> dict[str, Any]:
        return {"kept": [list(entry) for entry in self._kept]}

    def load(self, state: Mapping[str, Any], arrays: object) -> None:
        # A run that goes on in another folder does not have the old one's best there.
        self._kept = [
            [float(value), int(step)] for value, step in state["kept"] if step in self._on_disk
        ]

    def _rank(self, value: float, step: int) -> tuple[bool, bool]:
        """Take a value into the list; whether it is the best, and whether it is on it at all."""
        best = not self._kept or self._monitored.better(value, self._kept[0][0])
        entry = [value, step]
        # Of equal values the older stays first.
        self._kept.append(entry)
        self._kept.sort(key=lambda kept: -kept[0] if self._monitored.mode == "max" else kept[0])
        del self._kept[self._top_k :]
        return best, any(kept is entry for kept in self._kept)

    def _steps(self) -> list[int]:
        return [int(step) for _, step in self._kept]
