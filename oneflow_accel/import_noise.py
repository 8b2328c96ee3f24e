"""Keeps two messages off stderr that importing oneflow prints on every machine without RDMA or a
CUDA driver: `python -m oneflow_accel` tells what is missing where it matters.

They come from C++, so file descriptor 2 leads through a small process of its own while oneflow is
imported. It hands everything else on, in order. Were it a thread, what oneflow says as it aborts
would be lost with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Ends what is to be filtered. Nobody else writes it.
_END = b"\0oneflow_accel: oneflow is imported\0\n"
_READY, _DONE = b"r", b"d"
# Milliseconds until this process does without the other one.
_PATIENCE = 10_000
_RDMA = b"libibverbs not available, ibv_fork_init skipped\n"
_CUDA_FILE = b" cuda_device_descriptor_class.cpp:"
_CUDA = b"] CUDA driver version is insufficient for CUDA runtime version\n"


@contextmanager
def left_out() -> Iterator[None]:
    """Leave the messages out inside of the with block, if oneflow is not imported yet."""
    if "oneflow" in sys.modules:
        yield
        return
    # Here, as the other process runs this file and needs neither.
    import select
    import subprocess

    def answers(expected: bytes) -> bool:
        poll = select.poll()
        poll.register(output, select.POLLIN)
        return bool(poll.poll(_PATIENCE)) and os.read(output, 1) == expected

    try:
        stderr = os.dup(2)
    except OSError:  # closed: nobody will read them
        yield
        return
    reads, writes = os.pipe()
    try:
        # In a session of its own: Ctrl-C is for this process.
        process = subprocess.Popen(
            [sys.executable or "", "-I", "-S", __file__],
            stdin=reads,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError:
        process = None
    os.close(reads)
    if process is None or process.stdout is None:
        os.close(writes)
        os.close(stderr)
        yield
        return
    output = process.stdout.fileno()
    # sys.executable is another program where Python is embedded.
    leads_through = answers(_READY)
    if leads_through:
        _flush()
        os.dup2(writes, 2)
    os.close(writes)
    try:
        yield
    finally:
        if leads_through:
            _flush()
            with suppress(OSError):  # somebody has ended it
                os.write(2, _END)
                answers(_DONE)
            os.dup2(stderr, 2)
        else:
            process.kill()
        os.close(stderr)
        process.stdout.close()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            # A program that was started meanwhile has its stderr there, and may go on for long.
            _lasting.append(process)


_lasting: list[object] = []


def _flush() -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed
            sys.stderr.flush()


def filtered(waiting: bytes, at_line_start: bool, at_end: bool) -> tuple[bytes, bytes, bool]:
    """What can be handed on of some output (`waiting`, with what was kept before), what to keep
    until more is known, and whether the next begins a line."""
    written = b""
    while waiting:
        line, end, rest = waiting.partition(b"\n")
        line += end
        if not end and not at_end and (_may_be_noise(line, at_line_start) or _may_end(line)):
            return written, line, at_line_start
        if not (at_line_start and _is_noise(line)):
            written += line
        at_line_start = bool(end)
        waiting = rest
    return written, b"", at_line_start


def _is_noise(line: bytes) -> bool:
    return line == _RDMA or (line[:1] in b"IWEF" and _CUDA_FILE in line and line.endswith(_CUDA))


def _may_be_noise(line: bytes, at_line_start: bool) -> bool:
    # A message of glog begins with a letter and the date.
    return at_line_start and (
        _RDMA.startswith(line) or (line[:1] in b"IWEF" and (line[1:9] or b"0").isdigit())
    )


def _may_end(line: bytes) -> bool:
    return b"\0" in line and _END.startswith(line[line.index(b"\0") :])


def _write(data: bytes) -> None:
    import select

    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:  # nobody reads any more
            return


def _hand_on() -> None:
    """What the other process does: from descriptor 0 to 2, answers on 1."""
    os.write(1, _READY)
    waiting, at_line_start = b"", True
    while data := os.read(0, 1 << 16):
        before, end, after = (waiting + data).partition(_END)
        written, waiting, at_line_start = filtered(before, at_line_start, bool(end))
        _write(written)
        if end:
            with suppress(OSError):
                os.write(1, _DONE)
            _write(after)
            break
    _write(waiting)
    # Programs that were started meanwhile.
    while data := os.read(0, 1 << 16):
        _write(data)


if __name__ == "__main__":
    _hand_on()
