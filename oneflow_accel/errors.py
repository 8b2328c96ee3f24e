"""Errors that are a user's to mend: their text says what was wrong, where, and what to do."""

from __future__ import annotations


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
