"""SIGTERM, as a cluster sends it before it takes the machine away, and Ctrl-C: stop between two
steps, so that a checkpoint can be written."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from oneflow_accel import distributed, launched

# Ctrl-C reaches a launched process from the terminal, from its launcher and through its launcher's
# end: all that come within so many seconds are one request.
_ONE_REQUEST = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes in `requested` that this process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._signal = signal.SIGTERM
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports after such a signal; of `agreed`, the same on all
        processes."""
        return 128 + self._signal

    @property
    def name(self) -> str:
        return self._signal.name

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGTERM or Ctrl-C is noted and does nothing else; a second one acts as
        it does outside. Signals reach the main thread only: from any other this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        self._before = before
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any process was asked to; all processes call it at the same step."""
        by_signal = [float(self.requested and self._signal == number) for number in _SIGNALS]
        by_signal = distributed.all_reduce_sum(by_signal)
        for number, asked in zip(_SIGNALS, by_signal, strict=True):
            if asked:
                self._signal = number
        return any(by_signal)

    def _note(self, signum: int, frame: object) -> None:
        if self.requested and self._is_another():
            signal.signal(signum, self._before[signal.Signals(signum)])
            os.kill(os.getpid(), signum)
            return
        if not self.requested:
            self.requested, self._when = True, time.monotonic()
            launched.stops.set()
            self._signal = signal.Signals(signum)
            if signum == signal.SIGINT and launched.rank() == 0:
                os.write(2, b"\nstopping after this step; Ctrl-C again ends at once\n")

    def _is_another(self) -> bool:
        if not launched.launched():
            return True
        # The launcher's end comes as a signal too: the busier the machine, the later.
        return time.monotonic() > self._when + _ONE_REQUEST and not launched.orphaned()
