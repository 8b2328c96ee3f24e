"""`patch --apply`, `--revert` and `--status`, on a tiny package made for each test."""

from __future__ import annotations

import os
from pathlib import Path

from oneflow_accel.__main__ import main
from oneflow_accel.errors import PatchError
from oneflow_accel.patching import disk, package, session

import pytest

BOTH = {"numbers": ("return 1", "return 10"), "other": ("return 2", "return 20")}


def apply(fake) -> list[str]:
    return disk.apply(fake.root, fake.name)


def test_apply_then_revert_leaves_everything_as_it_was(fake) -> None:
    fake.add_patch(edits=BOTH)
    os.chmod(fake.numbers, 0o640)
    before = fake.snapshot()
    assert apply(fake) == [f"{fake.name}/numbers.py", f"{fake.name}/other.py"]
    assert fake.numbers.stat().st_mode & 0o777 == 0o640
    assert (fake.load().one(), fake.load("other").two()) == (10, 20)
    fake.forget()
    assert disk.revert(fake.name) == [f"{fake.name}/numbers.py", f"{fake.name}/other.py"]
    assert fake.snapshot() == before
    # Within the same second: the bytecode of the patched file must not be taken for current.
    assert (fake.load().one(), fake.load("other").two()) == (1, 2)


def test_memory_mode_recognizes_what_is_on_disk(fake) -> None:
    fake.add_patch()
    apply(fake)
    on_disk = fake.snapshot()
    current = fake.install()
    assert fake.load().one() == 10
    assert [status.state for status in current.status()] == ["applied-on-disk"]
    assert fake.snapshot() == on_disk


def test_memory_mode_refuses_other_patches_on_disk_than_it_needs(fake) -> None:
    file = fake.add_patch()
    apply(fake)
    file.write_text(file.read_text().replace("+    return 10", "+    return 11"))
    fake.install()
    with pytest.raises(PatchError, match=r"has 0001-change.patch applied on disk.*patch --apply"):
        fake.load()
    fake.forget()
    assert apply(fake) == [f"{fake.name}/numbers.py"]
    fake.install()
    assert fake.load().one() == 11


def test_apply_takes_back_what_the_series_has_no_more(fake) -> None:
    fake.add_patch("0001-first.patch")
    series = fake.root / f"{fake.name}-1.0" / "series"
    first = series.read_text()
    fake.add_patch("0002-second.patch", edits={"other": ("return 2", "return 20")})
    before = fake.other.read_bytes()
    assert apply(fake) == [f"{fake.name}/numbers.py", f"{fake.name}/other.py"]
    current = fake.session()
    assert [status.state for status in current.status()] == ["applied-on-disk"] * 2
    series.write_text(first)
    assert apply(fake) == [f"{fake.name}/other.py"]
    assert fake.other.read_bytes() == before


def test_dry_run_first_so_that_a_mismatch_changes_nothing(fake) -> None:
    fake.add_patch(edits=BOTH)
    fake.other.write_text("changed = 1\n")
    before = fake.snapshot()
    with pytest.raises(PatchError, match=r"0001-change.patch does not fit .*other.py"):
        apply(fake)
    assert fake.snapshot() == before


def test_a_failed_write_puts_back_what_was_written(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add_patch(edits=BOTH)
    before = fake.snapshot()
    write = package.write_atomically

    def full_disk(file: Path, content: bytes) -> None:
        if file == fake.other:
            raise OSError("No space left on device")
        write(file, content)

    monkeypatch.setattr(disk, "write_atomically", full_disk)
    with pytest.raises(PatchError, match=r"No space left on device.*nothing was changed"):
        apply(fake)
    assert fake.snapshot() == before


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(1, 9))
def test_killed_at_any_step_it_can_be_applied_again_or_reverted(
    fake, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    file = fake.add_patch(edits=BOTH)
    before = fake.snapshot()
    apply(fake)
    # Applied anew with other content, the longest way: both files go back and forth.
    file.write_text(file.read_text().replace("+    return ", "+    return 3 * "))
    left = [step]
    write = package.write_atomically

    def dies(file: Path, content: bytes) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        write(file, content)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "write_atomically", dies)
        patched.setattr(package, "write_atomically", dies)
        with pytest.raises(Killed):
            apply(fake)
    if step % 2:
        apply(fake)
        assert fake.load().one() == 30
    disk.revert(fake.name)
    assert fake.snapshot() == before


def test_a_file_modified_since_is_left_alone(fake) -> None:
    fake.add_patch(edits=BOTH)
    apply(fake)
    fake.other.write_text(fake.other.read_text() + "mine = 1\n")
    before = fake.snapshot()
    for action in (lambda: apply(fake), lambda: disk.revert(fake.name)):
        with pytest.raises(PatchError, match=r"other.py was modified since 0001-change.patch"):
            action()
    assert fake.snapshot() == before
    fake.install()
    with pytest.raises(PatchError, match="was modified since"):
        fake.load("other")


def test_a_lost_original_is_an_error(fake) -> None:
    fake.add_patch()
    apply(fake)
    (original,) = fake.site_packages.rglob("originals/*/numbers.py")
    original.write_text("something else\n")
    with pytest.raises(PatchError, match=r"is not the original of .* any more"):
        disk.revert(fake.name)
    original.unlink()
    with pytest.raises(PatchError, match="cannot be read"):
        disk.revert(fake.name)


def test_a_broken_state_file_is_an_error(fake) -> None:
    fake.add_patch()
    apply(fake)
    (state,) = fake.site_packages.rglob("state.json")
    state.write_text("{")
    with pytest.raises(PatchError, match=r"state.json is broken .*--force-reinstall"):
        disk.revert(fake.name)


def test_after_a_reinstall_patches_count_as_not_applied(fake) -> None:
    fake.add_patch()
    original = fake.numbers.read_bytes()
    apply(fake)
    fake.numbers.write_bytes(original)
    assert apply(fake) == [f"{fake.name}/numbers.py"]


def test_after_an_upgrade_revert_forgets_the_old_version(fake) -> None:
    fake.add_patch()
    original = fake.numbers.read_bytes()
    apply(fake)
    fake.set_version("1.1")
    fake.numbers.write_bytes(original)
    assert disk.revert(fake.name) == []
    assert fake.numbers.read_bytes() == original
    assert not list(fake.site_packages.glob(".oneflow_accel_patches"))


def run(fake, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(disk, "patch_root", lambda: fake.root)
    monkeypatch.setattr(session, "_session", fake.session())
    return main(["patch", *options])


def test_command_line(fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fake.add_patch()
    label = f"{fake.name}-1.0/0001-change.patch"
    assert run(fake, monkeypatch, "--status") == 0
    assert f"{label}: off" in capsys.readouterr().out
    assert run(fake, monkeypatch, "--apply") == 0
    assert capsys.readouterr().out == f"{fake.name}: patched {fake.name}/numbers.py\n"
    assert run(fake, monkeypatch, "--apply", "--package", fake.name) == 0
    assert capsys.readouterr().out == f"{fake.name}: nothing to do\n"
    assert run(fake, monkeypatch, "--status") == 0
    assert f"{label}: applied-on-disk" in capsys.readouterr().out
    assert run(fake, monkeypatch, "--revert") == 0
    assert capsys.readouterr().out == f"{fake.name}: put back {fake.name}/numbers.py\n"


def test_command_line_errors(
    fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fake.add_patch()
    assert run(fake, monkeypatch, "--apply", "--package", "nosuch") == 2
    said = f"oneflow_accel: error: there are no patches for 'nosuch', only for {fake.name}\n"
    assert capsys.readouterr().err == said
    fake.set_version("1.1")
    assert run(fake, monkeypatch, "--status") == 1
    assert "refused" in capsys.readouterr().out
    assert run(fake, monkeypatch, "--apply") == 2
    assert "0001-change.patch" in capsys.readouterr().err
    assert run(fake, monkeypatch, "--apply", "--revert") == 2
