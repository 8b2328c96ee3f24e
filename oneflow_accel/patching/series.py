"""Patch files: `patches/<package>-<version>/series`, the unified diffs that it lists, and how a
diff is applied.

A series is for the release in its folder's name. Where it also fits other builds it says which, in
a line of its own: `Builds: >=0.9.1.dev20230411, <=1.0.0` (version specifiers of PEP 440). The text
before a diff has fields of DEP-3 (https://dep-team.pages.debian.net/deps/dep3/) and, where the
builds of a series differ in a file, one of our own, `Applies-To-File`: its SHA-256 as installed. A
patch that is for some devices asks while it runs (`patching.runtime`). Hunks are applied without
fuzz and without offset.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from oneflow_accel.errors import PatchError

import unidiff
from packaging.specifiers import InvalidSpecifier, SpecifierSet

CONTEXT, REMOVED, ADDED = " ", "-", "+"


class SourceLine(NamedTuple):
    """A line with its line end, and its number in the unpatched file: None if a patch added it."""

    text: str
    number: int | None


@dataclass(frozen=True)
class Hunk:
    """One place that a patch changes: the index of its first line before the patch, from 0, and
    (CONTEXT, REMOVED or ADDED; text with its line end) of each line."""

    source_index: int
    lines: tuple[tuple[str, str], ...]


def source_lines(text: str) -> list[SourceLine]:
    """The lines of a file; only a line feed ends a line, as in a diff."""
    # str.splitlines would also split at form feeds, which Python sources may hold.
    return [SourceLine(line, number) for number, line in enumerate(io.StringIO(text), start=1)]


def join(lines: Iterable[SourceLine]) -> str:
    return "".join(line.text for line in lines)


def apply_hunks(
    lines: Sequence[SourceLine], hunks: Iterable[Hunk], *, label: str, path: str
) -> list[SourceLine]:
    """The lines of a file after hunks from top to bottom; label and path name patch and file in
    errors.

    Raises:
        PatchError: a hunk is not found word for word at its very line.
    """
    result: list[SourceLine] = []
    position = 0
    for hunk in hunks:
        result += lines[position : hunk.source_index]
        position = hunk.source_index
        for kind, text in hunk.lines:
            if kind == ADDED:
                result.append(SourceLine(text, None))
                continue
            found = lines[position].text if position < len(lines) else None
            if found != text:
                has = "ends before it" if found is None else f"has {found.rstrip()!r}"
                raise PatchError(
                    f"patch {label} does not fit {path}: line {position + 1} should be "
                    f"{text.rstrip()!r}, but the file {has}. The file is not the one of the pinned "
                    "release: reinstall the package"
                )
            if kind == CONTEXT:
                result.append(lines[position])
            position += 1
    result += lines[position:]
    return result


_ANYTHING = ("", ".*")
# What a field's value is, in words and as a pattern.
_FIELDS = {
    **dict.fromkeys(("Description", "Origin", "Author", "Bug", "Applied-Upstream"), _ANYTHING),
    "Forwarded": ("a URL, 'no' or 'not-needed'", r"https?://\S+|no|not-needed"),
    "Last-Update": ("a date, YYYY-MM-DD", r"\d{4}-[01]\d-[0-3]\d"),
    "Applies-To-File": ("64 hexadecimal digits", "[0-9a-f]{64}"),
}
_REQUIRED = ("Description", "Forwarded", "Last-Update")


def _parse_header(text: str, label: str) -> dict[str, str]:
    """The fields before a diff: `Field: value` lines, where a line that starts with a blank
    continues the field above. PatchError if a field is missing, unknown, repeated or not
    well-formed."""
    fields: dict[str, str] = {}
    problems = []
    for line in re.sub(r"\n[ \t]+", " ", text).splitlines():
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon:
            problems.append(f"{line!r} is not 'Field: value'")
        elif name not in _FIELDS:
            problems.append(f"unknown field {name!r}; fields are {', '.join(sorted(_FIELDS))}")
        elif name in fields:
            problems.append(f"{name} is there twice")
        fields[name] = value.strip()
    missing = [name for name in _REQUIRED if not fields.get(name)]
    if not fields.get("Origin") and not fields.get("Author"):
        missing.append("Origin or Author")
    if missing:
        problems.append(f"no {', '.join(missing)}")
    for name, (form, pattern) in _FIELDS.items():
        if fields.get(name) and not re.fullmatch(pattern, fields[name]):
            problems.append(f"{name} is {fields[name]!r}, not {form}")
    if problems:
        raise PatchError(f"patch {label}: broken header: {problems[0]}")
    return fields


SERIES = "series"
_BUILDS = "Builds:"
_DIFF_STARTS = re.compile(r"^(diff --git |--- )", re.MULTILINE)
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")


@dataclass(frozen=True)
class Patch:
    """One patch file, `NNNN-what-it-does.patch`, of the series `release` (PACKAGE-VERSION): hunks
    by path below site-packages; the SHA-256 of the only content of a file that it is for, None if
    it is for all builds of its series; and the patch file's own."""

    name: str
    release: str
    hunks: dict[str, tuple[Hunk, ...]]
    for_file: str | None
    sha256: str

    @property
    def label(self) -> str:
        return f"{self.release}/{self.name}"


def patch_root() -> Path:
    """The folder of all patches: inside the package where a wheel installed it (setup.py copies it
    there), else beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "_patches", package.parent / "patches")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise PatchError(
        f"no patches in {' or '.join(map(str, candidates))}: install oneflow-accel again"
    )


def series_versions(root: Path) -> dict[str, list[str]]:
    """The packages that have patches, each with the versions there is a series for."""
    versions: dict[str, list[str]] = {}
    for series in sorted(root.glob(f"*-*/{SERIES}")):
        package, _, version = series.parent.name.rpartition("-")
        versions.setdefault(package, []).append(version)
    return versions


def series_builds(root: Path, package: str, version: str) -> SpecifierSet:
    """The builds that the series of one release is for: its `Builds:` line, else that release."""
    lines = [line for line in _series_lines(root, package, version) if line.startswith(_BUILDS)]
    text = lines[0].removeprefix(_BUILDS) if lines else f"=={version}"
    try:
        return SpecifierSet(text, prereleases=True)
    except InvalidSpecifier as error:
        raise PatchError(f"{package}-{version}/{SERIES}: {error}") from error


def series_for(root: Path, package: str, installed: str) -> str | None:
    """The release whose series is for the build that is installed, None where there is none."""
    for version in series_versions(root).get(package, ()):
        if series_builds(root, package, version).contains(installed):
            return version
    return None


def patch_names(root: Path, package: str, version: str) -> list[str]:
    """File names in the series of one release, in order; `#` starts a comment."""
    lines = _series_lines(root, package, version)
    return [line for line in lines if not line.startswith(_BUILDS)]


def _series_lines(root: Path, package: str, version: str) -> list[str]:
    series = root / f"{package}-{version}" / SERIES
    try:
        lines = series.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise PatchError(f"{package} {version} has no series ({series})") from error
    return [text for text in (line.partition("#")[0].strip() for line in lines) if text]


def load_series(root: Path, package: str, version: str) -> list[Patch]:
    """The patches for one release of a package, in order. PatchError if there is no series, or a
    patch is missing or broken."""
    folder = root / f"{package}-{version}"
    return [load_patch(folder / name) for name in patch_names(root, package, version)]


def load_patch(file: Path) -> Patch:
    """Read one patch file. PatchError if it is missing or broken, or does something else than to
    edit Python files of its package."""
    label = f"{file.parent.name}/{file.name}"
    if not _PATCH_NAME.fullmatch(file.name):
        raise PatchError(f"patch {label}: the name is not NNNN-lower-case-words.patch")
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"patch {label} is in the series but cannot be read: {error}") from error
    start = _DIFF_STARTS.search(text)
    if start is None:
        raise PatchError(f"patch {label} holds no unified diff")
    fields, release = _parse_header(text[: start.start()], label), file.parent.name
    hunks = _parse_diff(text[start.start() :], release.rpartition("-")[0], label)
    digest = hashlib.sha256(content).hexdigest()
    return Patch(file.name, release, hunks, fields.get("Applies-To-File"), digest)


def _parse_diff(text: str, package: str, label: str) -> dict[str, tuple[Hunk, ...]]:
    text = text.rstrip("\n") + "\n"
    try:
        files = unidiff.PatchSet(text)
    except unidiff.UnidiffParseError as error:
        raise PatchError(f"patch {label}: broken diff: {error}") from error
    # unidiff passes over text that belongs to no hunk, such as lines past the count of a hunk.
    understood = sum(len(file.patch_info or ()) + 2 for file in files)
    understood += sum(len(hunk) + 1 for file in files for hunk in file)
    if understood != text.count("\n"):
        raise PatchError(f"patch {label}: broken diff: there are lines outside of any hunk")
    return {_path(file, package, label): _hunks(file, label) for file in files}


def _path(file: unidiff.PatchedFile, package: str, label: str) -> str:
    path = PurePosixPath(file.path)
    if file.is_added_file or file.is_removed_file or file.is_rename:
        raise PatchError(f"patch {label} adds, removes or renames {path}; it may only edit files")
    if path.suffix != ".py" or path.parts[0] != package or ".." in path.parts:
        raise PatchError(f"patch {label} edits {path}, which is not a Python file of {package}")
    return str(path)


def _hunks(file: unidiff.PatchedFile, label: str) -> tuple[Hunk, ...]:
    hunks = []
    end = shift = 0
    for parsed in file:
        # A side without lines is numbered by the line before it.
        source = parsed.source_start - (parsed.source_length > 0)
        target = parsed.target_start - (parsed.target_length > 0)
        if source < end or target != source + shift:
            raise PatchError(
                f"patch {label}: broken diff: hunk at line {parsed.source_start} of {file.path} "
                "overlaps another one or is numbered wrongly"
            )
        lines: list[tuple[str, str]] = []
        for line in parsed:
            if line.line_type != "\\":
                lines.append((line.line_type, line.value))
            else:
                # "\ No newline at end of file" is about the line above it.
                kind, text = lines[-1]
                lines[-1] = (kind, text.removesuffix("\n"))
        hunks.append(Hunk(source, tuple(lines)))
        end = source + parsed.source_length
        shift += parsed.target_length - parsed.source_length
    return tuple(hunks)
