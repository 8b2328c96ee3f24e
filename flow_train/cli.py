"""What the command lines of trainers share: options, and the types of values; where a model has
them, `config/flags.py`.

    parser = cli.Parser(prog="train.py")
    parser.add_argument("--epochs", type=cli.at_least(1))
    sys.exit(cli.run("train.py", lambda: train(parser.parse_args())))

`Parser` and how commands end are the device layer's, whose own commands need them too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from oneflow_accel.command import Parser, run
from oneflow_accel.errors import UserError

__all__ = [
    "DEVICE",
    "PROFILE",
    "Parser",
    "UserError",
    "at_least",
    "run",
    "share",
    "text_table",
]

# What --help says of options that programs share.
DEVICE = "device; $ONEFLOW_ACCEL_DEVICE, else the best one there is"
PROFILE = (
    "say where the time of this many steps goes, by module and by operator, and end; writes a "
    "trace for Perfetto or chrome://tracing"
)


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number from `least` on."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return whole_number


def share(text: str) -> float:
    """The type of a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def text_table(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Rows of cells in columns; `sides` has for each < (to the left, as texts) or > (to the right,
    as numbers)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)
