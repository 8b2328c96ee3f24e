"""Every patch in patches/: well-formed, in its series, and true to the installed release."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from oneflow_accel.errors import PatchError
from oneflow_accel.patching.code import parse
from oneflow_accel.patching.package import installed_version
from oneflow_accel.patching.series import (
    ADDED,
    Patch,
    SourceLine,
    apply_hunks,
    load_series,
    patch_root,
    series_versions,
    source_lines,
)

import pytest

ROOT = patch_root()
RELEASES = [(name, version) for name, all_ in series_versions(ROOT).items() for version in all_]
PATCHES = [patch for release in RELEASES for patch in load_series(ROOT, *release)]
# Those for other builds of oneflow are in test_stream_touch.py.
INSTALLED = [f"{name}-{installed_version(name)}" for name, _ in RELEASES]
HERE = [patch for patch in PATCHES if patch.release in INSTALLED]


def installed_text(path: str) -> str:
    distribution = importlib.metadata.distribution(path.partition("/")[0])
    return Path(str(distribution.locate_file(path))).read_text("utf-8")


def same_file(patch: Patch, path: str) -> list[Patch]:
    """The patches of a file up to and including this one, in order."""
    touching = [p for p in PATCHES if p.release == patch.release and path in p.hunks]
    return touching[: [other.name for other in touching].index(patch.name) + 1]


def apply_all(patches: list[Patch], path: str, text: str) -> list[SourceLine]:
    lines = source_lines(text)
    for patch in patches:
        lines = apply_hunks(lines, patch.hunks[path], label=patch.label, path=path)
    return lines


def test_there_are_patches_for_the_pinned_oneflow() -> None:
    assert ("oneflow", "0.9.0") in RELEASES
    assert len(HERE) >= 2


def test_every_file_in_a_folder_of_patches_is_in_its_series() -> None:
    listed = {patch.label for patch in PATCHES}
    files = (file for file in ROOT.glob("*/*") if file.parent.name != "__pycache__")
    present = {f"{file.parent.name}/{file.name}" for file in files if file.name != "series"}
    assert present == listed


@pytest.mark.parametrize("release", RELEASES, ids="-".join)
def test_series_is_numbered_in_order_without_repetition(release: tuple[str, str]) -> None:
    names = [patch.name for patch in load_series(ROOT, *release)]
    assert names == sorted(set(names))


@pytest.mark.parametrize("patch", HERE, ids=lambda patch: patch.label)
def test_fits_the_installed_release(patch: Patch) -> None:
    for path in patch.hunks:
        lines = apply_all(same_file(patch, path), path, installed_text(path))
        parse(lines, label=patch.label, path=path)
        assert lines != source_lines(installed_text(path))


@pytest.mark.parametrize("patch", HERE, ids=lambda patch: patch.label)
def test_drift_of_the_installed_file_is_noticed(patch: Patch) -> None:
    for path, hunks in patch.hunks.items():
        text = installed_text(path)
        patches = same_file(patch, path)
        before = apply_all(patches[:-1], path, text)
        relied_on = [
            before[hunk.source_index + index].number
            for hunk in hunks
            for index in range(sum(kind != ADDED for kind, _ in hunk.lines))
        ]
        assert relied_on
        for number in filter(None, relied_on):
            changed = [line.text for line in source_lines(text)]
            changed[number - 1] = "drift = 1\n"
            with pytest.raises(PatchError, match=f"does not fit {path}: line"):
                apply_all(patches, path, "".join(changed))
        with pytest.raises(PatchError, match=f"does not fit {path}: line"):
            apply_all(patches, path, "# one line more at the top\n" + text)
