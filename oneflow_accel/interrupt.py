"""Ctrl-C, which importing oneflow 0.9.0 takes away from Python."""

from __future__ import annotations

import os
import signal
import threading


def give_back() -> None:
    """Put Python's own handling of SIGINT back: KeyboardInterrupt, or what the program has set.

    oneflow's C++ code installs a handler while it is imported. It calls `exit` at once, whatever
    the other threads do: the process ends with 255 or in a segmentation fault, and says nothing.

    One of several processes is ended by the system instead, where the program has set nothing. It
    may stand in a collective that the others never join, and Python's end would wait for that.

    Handlers belong to the main thread: from any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    # What Python set before, as it does not know of the other one; None is what C code had set.
    own = signal.getsignal(signal.SIGINT)
    if own is signal.default_int_handler and os.environ.get("WORLD_SIZE", "1") != "1":
        own = signal.SIG_DFL
    if own is not None:
        signal.signal(signal.SIGINT, own)
