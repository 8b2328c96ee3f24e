"""Configs of the form {"_target_": CLASS, key: value, ...}, for the classes of an allow-list.

Nothing is imported by name: the last part of a target is looked up among known classes, and the
part before it must be a package that had or has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from oneflow_accel.errors import UserError, nearest

T = TypeVar("T")

TARGET = "_target_"
# The packages that a target may name: ours, and those of the papers' own code, so that their
# configs can be used as they are.
_PACKAGES = ("monarch_flow.", "src.models.", "src.ops.")
# Hydra's own keys; they say nothing about the class.
_HYDRA_KEYS = ("_recursive_", "_convert_")
_COLLECTING = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def choices(word: str, known: Collection[str]) -> str:
    """'did you mean ...?' with the nearest known word, whatever the case, and all of them."""
    guess = "".join(f"did you mean '{name}'? " for name in nearest(word, known, cutoff=0.0))
    return f"{guess}There are: {', '.join(sorted(known)) or 'none'}"


def split_target(
    config: Mapping[str, Any], known: Mapping[str, T], what: str
) -> tuple[T, dict[str, Any]]:
    """The class that a config names, and its options.

    The target is a key of `known` or a dotted path that ends with one; `what` says what these are
    in messages. Raises UserError where there is no `_target_`, or it names none of them.
    """
    options = {str(key): value for key, value in config.items() if key not in _HYDRA_KEYS}
    target = options.pop(TARGET, None)
    if not isinstance(target, str):
        raise UserError(
            f"the config of a {what} needs a key '{TARGET}' that names a class; it has: "
            f"{', '.join(map(str, config)) or 'no keys'}"
        )
    package, _, name = target.rpartition(".")
    if package and not f"{package}.".startswith(_PACKAGES):
        raise UserError(
            f"'{target}' is no {what} of this package: a target starts with 'monarch_flow.'; "
            f"{choices(name, known)}"
        )
    if name not in known:
        raise UserError(f"there is no {what} '{target}'; {choices(name, known)}")
    return known[name], options


def fill_options(
    options: Mapping[str, Any], function: Any, given: Collection[str], what: str
) -> dict[str, Any]:
    """`options` with the defaults of a class or function for those that are not there.

    `given` are parameters that the caller gives and a config must not. Raises UserError for an
    unknown or missing key, or a bool option whose value is not one.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given and parameter.kind not in _COLLECTING
    }
    for key in options:
        if key not in parameters:
            raise UserError(f"{what} has no option '{key}'; {choices(key, parameters)}")
    filled: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in options and parameter.default is parameter.empty:
            raise UserError(f"{what} needs the option '{name}'; it has: {', '.join(options)}")
        filled[name] = options.get(name, parameter.default)
        if isinstance(parameter.default, bool) and not isinstance(filled[name], bool):
            raise UserError(f"'{name}' of {what} is {filled[name]!r}; it must be true or false")
    return filled


def check_positive(what: str, value: Any, least: int = 1) -> int:
    """`value`; UserError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{what} is {value!r}; it must be a whole number of at least {least}")
    return value
