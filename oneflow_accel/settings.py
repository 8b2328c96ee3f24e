"""The environment variables of this code base: what they may be, their defaults, what they are for.

All are checked when oneflow_accel is imported, before anything has begun. One that is set to
nothing counts as not set.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from oneflow_accel.errors import UserError, did_you_mean

logger = logging.getLogger("oneflow_accel")

T = TypeVar("T")
_PREFIXES = ("ONEFLOW_ACCEL_", "FLOW_TRAIN_")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable; `read` makes a value of its text, or raises a ValueError that says what it is
    not. `choices` are the words that it may be, where these are all."""

    name: str
    read: Callable[[str], T]
    default: T
    help: str
    choices: tuple[str, ...] = ()

    def get(self) -> T:
        """Its value now; UserError where it is not allowed."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.read(text)
        except ValueError as error:
            raise UserError(f"{self.name}={text!r} is {error} ({self.help})") from None


ALL: dict[str, Variable[Any]] = {}


def _declare(
    name: str, read: Callable[[str], T], default: T, text: str, choices: tuple[str, ...] = ()
) -> Variable[T]:
    ALL[name] = variable = Variable(name, read, default, text, choices)
    return variable


def _choice(name: str, choices: tuple[str, ...], default: T, text: str) -> Variable[T | str]:
    def read(value: str) -> str:
        if value in choices:
            return value
        if len(choices) == 2:
            raise ValueError("neither {!r} nor {!r}".format(*choices))
        raise ValueError(f"none of {', '.join(choices)}")

    return _declare(name, read, default, text, choices)


def _flag(name: str, text: str) -> Variable[bool]:
    word = _choice(name, ("0", "1"), "0", text).read
    return _declare(name, lambda value: word(value) == "1", False, text, ("0", "1"))


def _switch(name: str, text: str) -> Variable[str]:
    return _choice(name, ("on", "off"), "on", text)


def _text(name: str, text: str) -> Variable[str | None]:
    return _declare(name, str, None, text)


def _number(text: str, least: float, most: float, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most:
        raise ValueError(f"not {expected}")
    return number


def _whole_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError("not a whole number from 1 to 1024")
    return int(text)


def _bytes(text: str) -> int:
    number, unit = text.removesuffix("B").removesuffix("i"), 1
    for power, letter in enumerate("KMGT", start=1):
        if number.endswith(letter):
            number, unit = number[:-1], 1024**power
    return int(_number(number, 0, 1e15, "a number of bytes, such as 2GiB") * unit)


def _faults(text: str) -> dict[str, str]:
    form = r"fail=\w+:[1-9]\d*|lost=[1-9]\d*|(bandwidth|latency|delay)=[0-9.]+(e[+-]?\d+)?"
    faults = dict(part.partition("=")[::2] for part in text.split(","))
    if not all(re.fullmatch(form, part) for part in text.split(",")):
        raise ValueError(
            "not a list of fail=OPERATOR:LAUNCH, lost=OPERATION, bandwidth=BYTES_PER_SECOND, "
            "latency=SECONDS and delay=SECONDS, such as fail=conv2d:3,latency=0.001"
        )
    return faults


def _watchdog(text: str) -> str:
    if text not in ("on", "off") and not (text.isdecimal() and int(text) <= 65535):
        raise ValueError("neither 'on' nor 'off' nor a port's number")
    return text


DEVICE = _text("ONEFLOW_ACCEL_DEVICE", "the device to use")
THREADS: Variable[int | None] = _declare(
    "ONEFLOW_ACCEL_THREADS", _whole_number, None, "threads of each CPU kernel"
)
ISA = _choice(
    "ONEFLOW_ACCEL_ISA",
    ("avx2", "avx512", "avx512_bf16", "amx"),
    None,
    "instruction sets of the CPU kernels",
)
EMULATE_BFLOAT16 = _flag("ONEFLOW_ACCEL_EMULATE_BFLOAT16", "bfloat16 by way of float32")
BLAS = _choice("ONEFLOW_ACCEL_BLAS", ("mkl", "onednn"), None, "what multiplies float32 matrices")
ALLOCATOR = _choice(
    "ONEFLOW_ACCEL_ALLOCATOR", ("mimalloc", "glibc"), "mimalloc", "where small C++ objects lie"
)
SCRATCH = _declare(
    "ONEFLOW_ACCEL_SCRATCH",
    lambda text: _number(text, 0, 1, "a number from 0 to 1"),
    1 / 16,
    "the part of the memory that kernels may keep",
)
PLUGIN = _switch("ONEFLOW_ACCEL_PLUGIN", "whether OneFlow gets our CPU kernels")
PATCHES = _switch("ONEFLOW_ACCEL_PATCHES", "whether oneflow and libai are patched")
DISABLE = _text("ONEFLOW_ACCEL_DISABLE", "operations that run on their references")
STRICT = _flag("ONEFLOW_ACCEL_STRICT", "whether falling back to a reference is an error")
WEIGHTS = _text("ONEFLOW_ACCEL_WEIGHTS", "the folder that --pretrained reads")
WATCHDOG = _declare(
    "ONEFLOW_ACCEL_WATCHDOG", _watchdog, "on", "how processes notice each other's end"
)
SHARED_MEMORY = _switch(
    "ONEFLOW_ACCEL_SHARED_MEMORY", "whether processes of one machine exchange tensors through it"
)
EMULATED_DEVICES: Variable[int | None] = _declare(
    "ONEFLOW_ACCEL_EMULATED_DEVICES", _whole_number, None, "how many emulated devices there are"
)
EMULATED_MEMORY = _declare(
    "ONEFLOW_ACCEL_EMULATED_MEMORY", _bytes, 8 << 30, "memory of an emulated device, such as 2GiB"
)
EMULATE = _text(
    "ONEFLOW_ACCEL_EMULATE", "whose lacks the emulated device and the CPU show: mlu, or a file"
)
EMULATED_STREAMS = _choice(
    "ONEFLOW_ACCEL_EMULATED_STREAMS",
    ("asynchronous", "synchronous"),
    "asynchronous",
    "whether streams of emulated devices have threads of their own",
)
EMULATED_FAULTS: Variable[dict[str, str] | None] = _declare(
    "ONEFLOW_ACCEL_EMULATED_FAULTS", _faults, None, "what goes wrong on emulated devices"
)
TRACEBACK = _flag("ONEFLOW_ACCEL_TRACEBACK", "whether errors come with their traceback")
# Read by setup.py, which runs where this package cannot be imported yet.
REQUIRE_PLUGIN = _flag("ONEFLOW_ACCEL_REQUIRE_PLUGIN", "whether installing needs the CPU kernels")
CACHE = _text("ONEFLOW_ACCEL_CACHE", "the folder of compiled CPU kernels, or off")
CURVES = _switch("FLOW_TRAIN_CURVES", "whether a run draws its curves")
PEAK: Variable[float | None] = _declare(
    "FLOW_TRAIN_PEAK",
    lambda text: _number(text, 1e-9, 1e9, "a number above 0, such as 312"),
    None,
    "TFLOP/s of one device",
)


def shows_tracebacks() -> bool:
    """Whether a user's error comes with its traceback; as in Hydra, HYDRA_FULL_ERROR asks for it,
    too. Raises nothing, as it is asked while errors are shown."""
    return "1" in map(os.environ.get, (TRACEBACK.name, "HYDRA_FULL_ERROR"))


def check() -> None:
    """Raise UserError for the first variable whose value is not allowed, and warn of names that
    begin like ours and are none."""
    for variable in ALL.values():
        variable.get()
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES) and name not in ALL:
            hint = did_you_mean(name, ALL, "docs/environment.md lists them")
            logger.warning("there is no variable %s, it changes nothing: %s", name, hint)
