"""What the commands of this package share: how they read text, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from oneflow_accel import command

from flow_train.cli import at_least
from libai_projects.text.line_blocks import LINE_BYTES

_STOPS = (signal.SIGTERM, signal.SIGINT)


def add_reading_options(
    group: argparse._ActionsContainer, *, bad_lines: str, longest: int, workers: int
) -> None:
    """The options of `corpus.ReadOptions`, with these defaults; `longest` in LINE_BYTES."""
    group.add_argument(
        "--bad-lines",
        choices=("skip", "error"),
        default=bad_lines,
        help="lines that are not UTF-8, not JSON, have no such key, are too long, or have a NUL: "
        "count them, or stop",
    )
    group.add_argument(
        "--max-line-bytes",
        metavar="N",
        type=at_least(1),
        default=longest * LINE_BYTES,
        help="a longer line is bad",
    )
    group.add_argument(
        "--workers", metavar="N", type=at_least(1), default=workers, help="processes that encode"
    )
    group.add_argument(
        "--strip", action="store_true", help="take white space off both ends of each text"
    )


def run_command(name: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code; user errors become one line on standard error.
    SIGTERM and Ctrl-C leave no partly written files."""

    def action() -> int:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            print(f"{name}: stopped; unfinished files were taken away", file=sys.stderr)
            return command.INTERRUPTED

    # SIGTERM must do so too: by default it would end the process at once.
    before = {which: signal.signal(which, _interrupt) for which in _STOPS}
    try:
        return command.run(name, action)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
