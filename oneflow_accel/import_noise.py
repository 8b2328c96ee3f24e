"""Keeps two messages off stderr that importing oneflow prints on every machine without RDMA or a
CUDA driver: `python -m oneflow_accel` tells what is missing where it matters.

They come from C++, so file descriptor 2 leads through sed while oneflow is imported, which hands
on everything else, in order. Were it a thread, what oneflow says as it aborts would be lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Whole lines; those of glog begin with a letter and the date.
_NOISE = (
    "libibverbs not available, ibv_fork_init skipped",
    r"[IWEF][0-9].* cuda_device_descriptor_class\.cpp:.*\] CUDA driver version is insufficient for "
    "CUDA runtime version",
)
# Unbuffered, so that nothing waits in it for a program that goes on.
_FILTER = ["sed", "-u", *(word for line in _NOISE for word in ("-e", f"/^{line}$/d"))]
# Seconds for the filter to end in, once nobody writes to it.
_PATIENCE = 1.0


@contextmanager
def left_out() -> Iterator[None]:
    """Leave the messages out inside of the with block, if oneflow is not imported yet."""
    if "oneflow" in sys.modules:
        yield
        return
    try:
        stderr = os.dup(2)
    except OSError:  # closed: nobody will read them
        yield
        return
    try:
        # In a session of its own: Ctrl-C is for this process.
        process = subprocess.Popen(
            _FILTER,
            stdin=subprocess.PIPE,
            stdout=stderr,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError:  # there is no sed
        os.close(stderr)
        yield
        return
    assert process.stdin is not None
    _flush()
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        _flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            # A program that was started meanwhile has its stderr there, and may go on for long.
            _lasting.append(process)


_lasting: list[object] = []


def _flush() -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            sys.stderr.flush()
