"""Reads patch files: `patches/<package>-<version>/series` and the unified diffs it lists.

A series is for the release in its folder's name. Where it also fits other builds it says which, in
a line of its own: `Builds: >=0.9.1.dev20230422, <=1.0.0` (version specifiers of PEP 440).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.header import Header, parse_header
from oneflow_accel.patching.hunks import ADDED, CONTEXT, REMOVED, Hunk

import unidiff
from packaging.specifiers import InvalidSpecifier, SpecifierSet

SERIES = "series"
_BUILDS = "Builds:"
_DIFF_STARTS = re.compile(r"^(diff --git |--- )", re.MULTILINE)
_PATCH_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")


@dataclass(frozen=True)
class Patch:
    """One patch file.

    Attributes:
        name: file name, `NNNN-what-it-does.patch`.
        header: what it is for and when it is needed.
        hunks: what it changes in each file, by path below site-packages.
        sha256: of the patch file.
    """

    name: str
    header: Header
    hunks: dict[str, tuple[Hunk, ...]]
    sha256: str

    @property
    def label(self) -> str:
        """Folder and file name, as errors and logs name it."""
        return f"{self.header.package}-{self.header.version}/{self.name}"


def patch_root() -> Path:
    """The folder of all patches: inside the package where a wheel installed it (setup.py copies it
    there), else beside the package in a checkout.

    Raises:
        PatchError: there is neither.
    """
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
    """The builds that the series of one release is for: its `Builds:` line, else that release.

    Raises:
        PatchError: there is no series for this release, or its line is not a version specifier.
    """
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
    """File names in the series of one release, in order; `#` starts a comment.

    Raises:
        PatchError: there is no series for this release.
    """
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
    """The patches for one release of a package, in order.

    Raises:
        PatchError: there is no series, or a patch is missing, broken or for another release.
    """
    folder = root / f"{package}-{version}"
    patches = []
    for name in patch_names(root, package, version):
        patch = load_patch(folder / name)
        if (patch.header.package, patch.header.version) != (package, version):
            raise PatchError(
                f"patch {folder.name}/{name}: Applies-To says {patch.header.package}=="
                f"{patch.header.version}, but it is in the series of {package}=={version}"
            )
        patches.append(patch)
    return patches


def load_patch(file: Path) -> Patch:
    """Read one patch file.

    Raises:
        PatchError: it is missing, its header or its diff is broken, or it does something else
            than to edit Python files of its package.
    """
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
    header = parse_header(text[: start.start()], label)
    hunks = _parse_diff(text[start.start() :], header.package, label)
    return Patch(file.name, header, hunks, hashlib.sha256(content).hexdigest())


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
        hunks.append(Hunk(source, target, _hunk_lines(parsed)))
        end = source + parsed.source_length
        shift += parsed.target_length - parsed.source_length
    return tuple(hunks)


def _hunk_lines(parsed: unidiff.Hunk) -> tuple[tuple[str, str], ...]:
    lines: list[tuple[str, str]] = []
    for line in parsed:
        if line.line_type in (CONTEXT, REMOVED, ADDED):
            lines.append((line.line_type, line.value))
        elif line.line_type == "\\":
            # "\ No newline at end of file" is about the line above it.
            kind, text = lines[-1]
            lines[-1] = (kind, text.removesuffix("\n"))
    return tuple(lines)
