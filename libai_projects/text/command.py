"""What the commands of this package share: how they read text, and how they end."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from oneflow_accel import command

from libai_projects.text.line_blocks import LINE_BYTES

_STOPS = (signal.SIGTERM, signal.SIGINT)


class CommandFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


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
        type=at_least_one,
        default=longest * LINE_BYTES,
        help="a longer line is bad",
    )
    group.add_argument(
        "--workers", metavar="N", type=at_least_one, default=workers, help="processes that encode"
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
