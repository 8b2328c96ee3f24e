"""What the commands of this package share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from oneflow_accel.errors import UserError

_STOPS = (signal.SIGTERM, signal.SIGINT)


class CommandFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or action.default is argparse.SUPPRESS:
            return action.help
        return super()._get_help_string(action)


def at_least_one(text: str) -> int:
    """An option's whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def run_command(name: str, run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code; user errors become one line on standard error.

    SIGTERM and Ctrl-C end it so that no partly written files are left.
    """
    # SIGTERM as well: it would end the process at once.
    before = {which: signal.signal(which, _interrupt) for which in _STOPS}
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    except KeyboardInterrupt:
        print(f"{name}: stopped; unfinished files were taken away", file=sys.stderr)
        return 130
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
