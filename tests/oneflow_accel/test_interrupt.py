"""Ctrl-C is Python's, though importing oneflow takes it away."""

from __future__ import annotations

import signal

from oneflow_accel import command

import pytest

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


@pytest.mark.parametrize(
    ("processes", "before", "after"),
    [
        ("1", signal.default_int_handler, signal.default_int_handler),
        ("2", signal.default_int_handler, signal.SIG_DFL),
        ("2", signal.SIG_IGN, signal.SIG_IGN),
    ],
)
def test_one_of_several_processes_ends_at_once(processes, before, after, monkeypatch) -> None:
    """As with nohup, what was to be ignored is."""
    monkeypatch.setenv("WORLD_SIZE", processes)
    ours = signal.signal(signal.SIGINT, before)
    try:
        command.give_back_interrupt()
        assert signal.getsignal(signal.SIGINT) is after
    finally:
        signal.signal(signal.SIGINT, ours)
