"""Ctrl-C, which importing oneflow 0.9.0 takes away from Python."""

from __future__ import annotations

import signal
import threading


def give_back() -> None:
    """Put Python's own handling of SIGINT back: KeyboardInterrupt, or what the program has set.

    oneflow's C++ code installs a handler while it is imported. It calls `exit` at once, whatever
    the other threads do: the process ends with 255 or in a segmentation fault, and says nothing.
    Handlers belong to the main thread: from any other this does nothing.
    """
    # What Python set before, as it does not know of the other one; None is what C code had set.
    own = signal.getsignal(signal.SIGINT)
    if own is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, own)
