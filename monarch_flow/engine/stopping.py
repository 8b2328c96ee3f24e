"""SIGTERM, as a cluster sends it before it takes the machine away: stop between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from oneflow_accel.training import distributed


class StopRequest:
    """Notes that this process was asked to stop."""

    # What a shell reports of a process that SIGTERM ended.
    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGTERM is noted and does nothing else; a second one ends the process.
        Signals reach the main thread only: from any other this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self) -> bool:
        """Whether any process was asked to; all processes call it at the same step."""
        return bool(distributed.all_reduce_sum([float(self.requested)])[0])

    def _note(self, signum: int, frame: object) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
