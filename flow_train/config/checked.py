"""Checks of configuration mappings: unknown names and keys, wrong types."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from oneflow_accel.errors import UserError

# What a mapping may say about itself, and what is not an option of the thing it describes.
NAME_KEYS = ("_target_", "name")


def name_of(
    config: Mapping[str, Any],
    known: Collection[str],
    aliases: Mapping[str, str],
    *,
    what: str,
    default: str,
) -> str:
    """Which of `known` a mapping names in `name` or as the last part of `_target_`, in any case.

    Raises:
        UserError: it names something else; the text has the nearest name.
    """
    value = config.get("name") or config.get("_target_") or default
    name = str(value).rpartition(".")[2].lower().removesuffix("schedule")
    name = aliases.get(name, name)
    if name not in known:
        raise UserError(f"unknown {what} '{value}'{_nearest(name, known)}")
    return name


def checked_options(
    config: Mapping[str, Any],
    types: Mapping[str, Callable[[Any], Any]],
    *,
    what: str,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """The options of a mapping, each converted to its type; a value of None is left out.

    Args:
        config: the mapping, with or without NAME_KEYS.
        types: by key `float`, `int`, `bool`, or a function that raises TypeError or ValueError.
        what: named in messages.
        ignored: further keys that may be there.

    Raises:
        UserError: an unknown key (with the nearest one) or a value that cannot be converted.
    """
    options = {}
    for key, value in config.items():
        if key in NAME_KEYS or key in ignored or value is None:
            continue
        if key not in types:
            raise UserError(f"{what} has no option '{key}'{_nearest(key, types)}")
        options[key] = _converted(value, types[key], f"{what}: {key}")
    return options


def _converted(value: Any, kind: Callable[[Any], Any], where: str) -> Any:
    try:
        if kind is bool and not isinstance(value, bool):
            raise TypeError("expected true or false")
        if kind in (int, float) and isinstance(value, bool):
            raise TypeError("expected a number")
        converted = kind(value)
        if kind is int and converted != float(value):
            raise ValueError("expected a whole number")
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is {value!r}: {error}") from error
    return converted


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"{hint}; there are: {', '.join(sorted(known))}"
