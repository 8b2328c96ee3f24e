"""Ctrl-C is Python's, though importing oneflow takes it away."""

from __future__ import annotations

from tests.launch import run_process

PROGRAM = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import oneflow_accel
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_is_an_exception() -> None:
    run = run_process(["-c", PROGRAM])
    assert run.stdout.splitlines()[-1] == "interrupted", run.stdout
    assert run.returncode == 0
