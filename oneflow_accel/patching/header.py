"""The header of a patch file: fields of DEP-3 (https://dep-team.pages.debian.net/deps/dep3/) and
two of our own, `Applies-To` and `Applies-When`."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from oneflow_accel.errors import PatchError

_FIELDS = {
    "Description",
    "Origin",
    "Author",
    "Bug",
    "Forwarded",
    "Applied-Upstream",
    "Last-Update",
    "Applies-To",
    "Applies-When",
}
_REQUIRED = ("Description", "Forwarded", "Last-Update", "Applies-To", "Applies-When")
_FIELD = re.compile(r"(?P<name>[A-Za-z][A-Za-z-]*):(?P<value>.*)")
_PINNED = re.compile(r"(?P<package>[A-Za-z0-9_.-]+)==(?P<version>[A-Za-z0-9_.!-]+)")
_CONDITION = re.compile(r"(?P<kind>[a-z-]+):\s*(?P<value>[a-z][a-z0-9_]*)")
_KINDS_WITH_VALUE = ("device", "feature", "feature-missing")


@dataclass(frozen=True)
class Condition:
    """When a patch is needed.

    Attributes:
        kind: "always"; or "device", "feature" or "feature-missing" of the selected device.
        value: the name of the device or feature, empty for "always".
    """

    kind: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.value}" if self.value else self.kind


@dataclass(frozen=True)
class Header:
    """What a patch says about itself; `package` and `version` are what it is a diff against."""

    description: str
    package: str
    version: str
    applies_when: Condition
    forwarded: str
    last_update: datetime.date


def parse_condition(text: str) -> Condition:
    """The condition in an `Applies-When` field.

    Args:
        text: `always`, `device: NAME`, `feature: NAME` or `feature-missing: NAME`.

    Raises:
        ValueError: anything else.
    """
    text = text.strip()
    if text == "always":
        return Condition("always")
    match = _CONDITION.fullmatch(text)
    if match is None or match["kind"] not in _KINDS_WITH_VALUE:
        forms = ", ".join(f"'{kind}: NAME'" for kind in _KINDS_WITH_VALUE)
        raise ValueError(f"Applies-When is {text!r}, neither 'always' nor one of {forms}")
    return Condition(match["kind"], match["value"])


def parse_header(text: str, label: str) -> Header:
    """Read the text before a diff.

    Args:
        text: `Field: value` lines; a line that starts with a blank continues the field above.
        label: names the patch in errors.

    Raises:
        PatchError: a field is missing, unknown, repeated or not well-formed.
    """
    try:
        return _header(_fields(text))
    except ValueError as error:
        raise PatchError(f"patch {label}: broken header: {error}") from error


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and name:
            fields[name] = f"{fields[name]} {line.strip()}".strip()
            continue
        if not line.strip():
            continue
        match = _FIELD.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r} is not 'Field: value'")
        name = match["name"]
        if name not in _FIELDS:
            raise ValueError(f"unknown field {name!r}; fields are {', '.join(sorted(_FIELDS))}")
        if name in fields:
            raise ValueError(f"{name} is there twice")
        fields[name] = match["value"].strip()
    return fields


def _header(fields: dict[str, str]) -> Header:
    missing = [name for name in _REQUIRED if not fields.get(name)]
    if not fields.get("Origin") and not fields.get("Author"):
        missing.append("Origin or Author")
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    forwarded = fields["Forwarded"]
    if forwarded not in ("no", "not-needed") and not re.match(r"https?://\S+$", forwarded):
        raise ValueError(f"Forwarded is {forwarded!r}, neither a URL nor 'no' nor 'not-needed'")
    pinned = _PINNED.fullmatch(fields["Applies-To"])
    if pinned is None:
        raise ValueError(f"Applies-To is {fields['Applies-To']!r}, not PACKAGE==VERSION")
    return Header(
        description=fields["Description"],
        package=pinned["package"],
        version=pinned["version"],
        applies_when=parse_condition(fields["Applies-When"]),
        forwarded=forwarded,
        last_update=datetime.date.fromisoformat(fields["Last-Update"]),
    )
