"""How every command ends: with a sentence where a user can mend what was wrong, never a traceback.

sys.exit(command.run("main.py", lambda: train(argv)))
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from oneflow_accel import launched, machine, settings
from oneflow_accel.errors import UserError, did_you_mean

# What a shell reports of a process that Ctrl-C ended, and of one whose output nobody reads.
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE
# A kernel or a device has failed, as csrc/common/failures.cpp raises it.
KERNEL_FAILED = 1
_KERNEL = "oneflow_accel: "
# What to do where memory runs out, where a command has no words of its own.
SMALLER = (
    "take a smaller batch, accumulate over more of them, compute in bfloat16, or cut the model "
    "over more processes"
)
_OUT_OF_MEMORY = "out of memory: "


class Parser(argparse.ArgumentParser):
    """The parser of every command: a wrong command line is a UserError, which one of several
    processes prints, and names the nearest option or value; --help shows defaults."""

    # What messages call an option.
    word = "option"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the {self.word}s")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        self.refuse(unknown)
        return known

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_intermixed_args(args, namespace)
        self.refuse(unknown)
        return known

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise a UserError where there is anything that no option takes."""
        names = [text.split("=")[0] for text in unknown if text.startswith("-")]
        if names:
            raise UserError("\n".join(map(self.unknown, names)))
        if unknown:
            self.error(f"{unknown[0]!r} is one argument too many")

    def unknown(self, name: str) -> str:
        """What there is to say about an option that does not exist."""
        otherwise = f"--help lists the {self.word}s"
        return f"there is no {self.word} {name}; {did_you_mean(name, self.flags(), otherwise)}"

    def flags(self) -> list[str]:
        """All options, those of subcommands too."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for parser in action.choices.values() for flag in parser.flags()]
        return flags

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}; {near}".rstrip("; ")) from None


class _Help(argparse.HelpFormatter):
    """Shows defaults where there are any, and keeps the lines of a text with indented ones."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows = action.option_strings and action.default not in (None, argparse.SUPPRESS)
        if not shows or action.default is False or "default" in (action.help or ""):
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n  " in text:
            return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


def run(program: str, action: Callable[[], int | None], smaller: str = SMALLER) -> int:
    """Run what a command does, and return its exit code: what `action` returns (None for 0);
    `UserError.EXIT_CODE` after a user's error, or a lack of memory, against which `smaller` says
    what to do; KERNEL_FAILED where a kernel or a device has failed; INTERRUPTED after Ctrl-C (the
    text of a KeyboardInterrupt says what there is to go on with), BROKEN_PIPE where whoever read
    the output has gone, as after `| head`.

    Of several processes one on each machine prints the error, and this ends all of them.
    """
    try:
        code = action() or 0
        # What is still in the buffer may find the reader gone, too.
        sys.stdout.flush()
    except UserError as error:
        return fail(program, str(error), error)
    except (RuntimeError, MemoryError) as error:
        ending = sentence(error, smaller)
        if ending is None:
            raise
        return fail(program, ending[0], error, ending[1])
    except KeyboardInterrupt as interrupt:
        way_on = f"; {interrupt}" if str(interrupt) else ""
        return _end(f"{program}: interrupted{way_on}", INTERRUPTED)
    except BrokenPipeError:
        # Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _end("", BROKEN_PIPE)
    return code


def sentence(error: Exception, smaller: str = SMALLER) -> tuple[str, int] | None:
    """With what sentence and exit code a command ends after a lack of memory, or a failure of a
    kernel or a device; None for another error."""
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    text = _out_of_memory(error)
    if text is not None:
        return f"{text}; {smaller}", UserError.EXIT_CODE
    if not str(error).startswith(_KERNEL):
        return None
    text = str(error).removeprefix(_KERNEL)
    return f"{text}; a run of training goes on from its last checkpoint", KERNEL_FAILED


def _out_of_memory(error: RuntimeError | MemoryError) -> str | None:
    """What it says of a lack of memory: of the device (csrc/common/memory.cpp), or of Python's."""
    text = str(error)
    if isinstance(error, MemoryError):
        left = (machine.free_memory() or 0) / 2**30
        text = f"{_OUT_OF_MEMORY}{text or 'Python got none'}, and {left:.1f} GiB are left"
    start = text.find(_OUT_OF_MEMORY)
    return None if start < 0 else text[start:].splitlines()[0]


@contextlib.contextmanager
def said_at_import() -> Iterator[None]:
    """A UserError inside, while a program imports this package, ends the program as `run` would end
    it, and is an exception as any other to whoever catches it."""
    try:
        yield
    except UserError as error:
        said, before = error, sys.excepthook

        def end(
            kind: type[BaseException], raised: BaseException, trace: TracebackType | None
        ) -> None:
            if raised is not said:
                return before(kind, raised, trace)
            program = Path(sys.argv[0]).name
            name = "oneflow_accel" if program in ("-m", "-c") else program
            sys.exit(fail(name, str(raised), raised))

        sys.excepthook = end
        raise


def give_back_interrupt() -> None:
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


def fail(
    program: str,
    text: str,
    error: BaseException | None = None,
    code: int = UserError.EXIT_CODE,
) -> int:
    """Say what a user has to mend, and end a job of several processes; after the traceback of
    `error`, where the environment asks for it.

    Returns:
        `code`, where this process is the only one.
    """
    # The message names ranks other than 0, for a file may be missing on their machine alone.
    where = f" (process {launched.rank()})" if launched.rank() else ""
    shown = error is not None and settings.shows_tracebacks()
    trace = "".join(traceback.format_exception(error)) if shown else ""
    return _end(f"{trace}{program}: error{where}: {text}", code)


def log_to_stdout() -> None:
    """Send log lines to the standard output, as text."""
    handler = _Handler(sys.stdout)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler])


class _Handler(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let the command end where nobody reads it; logging would print a traceback per line."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            raise
        super().handleError(record)


def _end(text: str, code: int) -> int:
    if launched.launched():
        launched.end(text, code)
    if text:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.stderr.write(f"{text}\n")
    return code
