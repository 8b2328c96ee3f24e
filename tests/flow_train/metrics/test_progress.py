"""Rate, remaining time, and the bar that only a terminal sees."""

from __future__ import annotations

import io
import math
import sys

import pytest

from flow_train.metrics import console
from flow_train.metrics.console import Progress, format_eta


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns: clock[0] is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_rate_and_eta(clock):
    bar = Progress(100, "step", enabled=False)
    assert (bar.rate(), bar.eta_seconds()) == (0, math.inf)
    for _ in range(10):
        clock[0] += 0.5
        bar.update()
    assert bar.rate() == pytest.approx(2)
    assert bar.eta_seconds() == pytest.approx(45)
    bar.update(90)
    assert bar.eta_seconds() == 0
    # A slow start is forgotten.
    bar = Progress(10000, "step", enabled=False)
    clock[0] += 100
    for _ in range(100):
        clock[0] += 0.1
        bar.update()
    assert bar.rate() == pytest.approx(10)
    # Steps before a resume do not count for the rate.
    bar = Progress(1000, "step", enabled=False, done=900)
    clock[0] += 10
    bar.update(10)
    assert bar.rate() == pytest.approx(1)
    assert bar.eta_seconds() == pytest.approx(90)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (90061, "1d 1:01:01"), (math.inf, "?")],
)
def test_format_eta(seconds, text):
    assert format_eta(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "enabled", "drawn"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
    ids=["terminal", "other process", "log file"],
)
def test_bar_is_for_terminals(monkeypatch, stream, enabled, drawn):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(2, "step", enabled=enabled) as bar:
        bar.update(loss="1.234")
        bar.update(loss="0.987")
    assert ("0.987" in stream.getvalue()) == drawn
    assert (stream.getvalue() == "") == (not drawn)


@pytest.mark.parametrize("to_terminal", [True, False])
def test_lines_go_to_standard_output_also_beside_a_bar(monkeypatch, to_terminal):
    out = Terminal() if to_terminal else io.StringIO()
    err = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(2, "step") as bar:
        bar.print("Loss [1.5] (2.0)")
        bar.update()
    Progress(2, "step", enabled=False).print("of another process")
    shown = err.getvalue() if to_terminal else out.getvalue()
    assert shown.count("Loss [1.5] (2.0)") == 1
    assert "another process" not in out.getvalue() + err.getvalue()
