"""Errors that are a user's to mend: their text says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a bad environment. Command lines print its text, without a traceback, and
    exit with `EXIT_CODE`."""

    EXIT_CODE = 2


class DeviceUnavailableError(UserError):
    """A device was asked for by name and is not there; the text names what is missing."""


class CheckpointError(UserError):
    """A checkpoint is missing, corrupt, or of another model."""


class DataError(UserError):
    """A dataset is missing, empty, or has too many files that cannot be read."""


class PatchError(UserError):
    """A patch does not fit the installed package; the text names the patch."""


def nearest(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """What a mistyped name may have meant: up to `most` of `known`, the likeliest first.

    Case and leading dashes make no difference. Where nothing is like the whole name, the last parts
    of dotted names are compared: `lr` may have meant `optim.lr`.
    """
    whole = {text.lstrip("-").lower(): text for text in sorted(known)}
    last = {text.rpartition(".")[2]: whole[text] for text in whole}
    asked = name.lstrip("-").lower()
    for names, text in ((whole, asked), (last, asked.rpartition(".")[2])):
        if near := difflib.get_close_matches(text, names, n=most, cutoff=cutoff):
            return [names[one] for one in near]
    return []


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, most: int = 1, cutoff: float = 0.6
) -> str:
    """`nearest` as the end of a message, "did you mean resnet50 or resnet18?"; `otherwise` where
    nothing is near."""
    near = nearest(name, known, most=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
