"""Patches applied while modules are imported, with a tiny package made for each test."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from unittest.mock import Mock

from oneflow_accel.errors import PatchError
from oneflow_accel.patching import code

import pytest

BOTH = {"numbers": ("return 1", "return 10"), "other": ("return 2", "return 20")}
LONGER = {"numbers": ("    return 1", "    number = 1\n    return fail(number)")}


def states(current) -> dict[str, str]:
    return {status.name: status.state for status in current.status()}


def test_applies_while_imported_and_touches_nothing_on_disk(fake) -> None:
    fake.add_patch(edits=BOTH)
    before = fake.snapshot()
    current = fake.install()
    assert states(current) == {"0001-change.patch": "pending"}
    assert fake.load().one() == 10
    assert fake.load("other").two() == 20
    assert states(current) == {"0001-change.patch": "applied"}
    assert fake.name in current.status()[0].reason
    assert fake.snapshot() == before
    assert fake.load().__loader__.get_source(f"{fake.name}.numbers").count("return 10") == 1


def test_leaves_no_patched_bytecode_behind(fake) -> None:
    fake.add_patch()
    fake.install()
    assert fake.load().one() == 10
    fake.forget()
    assert fake.load().one() == 1


def test_order_is_that_of_the_series_on_one_file(fake) -> None:
    first = {"numbers": ("return 1", "return 10")}
    changed = fake.numbers.read_text().replace("return 1", "return 10")
    # Named against its place, so that only the series can give the order.
    fake.add_patch("0002-first.patch", edits=first)
    fake.add_patch(
        "0001-second.patch",
        edits={"numbers": ("return 10", "return 100")},
        before={"numbers": changed},
    )
    fake.install()
    assert fake.load().one() == 100


def test_all_or_nothing_when_the_second_patch_of_a_file_does_not_fit(fake) -> None:
    fake.add_patch("0001-fits.patch")
    other = fake.numbers.read_text().replace("return 2", "return 3")
    edit = {"numbers": ("return 3", "return 4")}
    fake.add_patch("0002-does-not.patch", edits=edit, before={"numbers": other})
    current = fake.install()
    with pytest.raises(PatchError, match=rf"{fake.name}-1.0/0002-does-not.patch does not fit"):
        fake.load()
    assert f"{fake.name}.numbers" not in sys.modules
    assert set(states(current).values()) == {"refused"}


@pytest.mark.parametrize("edit", [("return 1", "return 7"), ("def one", "\ndef one")])
def test_refuses_a_changed_or_shifted_line(fake, edit: tuple[str, str]) -> None:
    fake.add_patch()
    fake.numbers.write_text(fake.numbers.read_text().replace(*edit))
    fake.install()
    with pytest.raises(PatchError, match=r"numbers.py: line \d+ should .*reinstall .*PATCHES=off"):
        fake.load()


def test_refuses_another_version_and_names_both(fake) -> None:
    fake.add_patch()
    fake.set_version("1.1")
    current = fake.install()
    with pytest.raises(PatchError, match=rf"1.1 is in .*0001-change.patch.*{fake.name}==1.0"):
        fake.load("other")
    assert states(current) == {"0001-change.patch": "refused"}


def test_an_empty_series_says_that_a_version_needs_nothing(fake) -> None:
    fake.add_patch()
    fake.set_version("2.0")
    (fake.root / f"{fake.name}-2.0").mkdir()
    (fake.root / f"{fake.name}-2.0" / "series").write_text("# nothing to patch\n")
    current = fake.install()
    assert fake.load().one() == 1
    assert current.status() == []


def test_refuses_a_patch_that_leaves_no_valid_python(fake) -> None:
    fake.add_patch(edits={"numbers": ("return 1", "return (")})
    fake.install()
    with pytest.raises(PatchError, match=r"0001-change.patch: .* is not valid Python after it"):
        fake.load()


def test_refuses_a_patch_for_a_file_that_is_not_there(fake) -> None:
    fake.add_patch(edits=BOTH)
    fake.other.unlink()
    current = fake.install()
    assert fake.load().one() == 10
    with pytest.raises(ModuleNotFoundError):
        fake.load("missing")
    with pytest.raises(PatchError, match=r"0001-change.patch edits .*other.py, which cannot be"):
        fake.load("other")
    assert states(current) == {"0001-change.patch": "refused"}


@pytest.mark.parametrize("kept", ["not yet", "whole", "cut", "of another patch"])
def test_traceback_shows_patched_lines_and_keeps_numbers_of_others(fake, monkeypatch, kept) -> None:
    """Also of bytecode that an earlier process has kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    patch = fake.add_patch(edits=LONGER)
    if kept != "not yet":
        text = patch.read_text()
        patch.write_text(text.replace("fail", "fall") if kept == "of another patch" else text)
        fake.install()
        fake.load()
        fake.forget()
        linecache.clearcache()
        patch.write_text(text)
        (file,) = (fake.root / "__pycache__").iterdir()
        file.write_bytes(file.read_bytes()[: -9 if kept == "cut" else None])
    parsed = Mock(wraps=code.parse_numbered)
    monkeypatch.setattr(code, "parse_numbered", parsed)
    fake.install()
    module = fake.load()
    assert parsed.call_count == (kept != "whole")
    on_disk = fake.numbers.read_text().splitlines()
    with pytest.raises(NameError) as caught:
        module.one()
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{fake.numbers}", line {len(on_disk) + 3}, in one' in shown
    assert "    return fail(number)\n" in shown
    # Below the patch, two lines longer now, everything has the number that it has on disk.
    line = module.two.__code__.co_firstlineno
    assert on_disk[line - 1] == "def two():"
    assert inspect.getsource(module.two) == "def two():\n    return 2\n"
