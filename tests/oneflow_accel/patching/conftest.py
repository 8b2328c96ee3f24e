"""A tiny installed package and patches against it, in a folder of their own."""

from __future__ import annotations

import difflib
import importlib
import itertools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

from oneflow_accel.patching.session import Session

import pytest

HEADER = {
    "Description": "Change a number.",
    "Author": "the tests",
    "Forwarded": "no",
    "Last-Update": "2026-01-31",
}
MODULE = "\n".join(
    ["def one():", "    return 1", "", *("# filler",) * 6, "def two():", "    return 2"]
)
_numbers = itertools.count()


class FakePackage:
    """`NAME` 1.0 in site-packages, with a module `numbers` and one `other`."""

    def __init__(self, folder: Path) -> None:
        # A name of its own for every test: modules stay importable and linecache keeps entries.
        self.name = f"fake{next(_numbers)}"
        self.site_packages = folder / "site-packages"
        self.root = folder / "patches"
        self.root.mkdir()
        package = self.site_packages / self.name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        self.set_version("1.0")
        self.numbers = package / "numbers.py"
        self.other = package / "other.py"
        for file in (self.numbers, self.other):
            file.write_text(MODULE + "\n")

    def set_version(self, version: str) -> None:
        for old in self.site_packages.glob("*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = self.site_packages / f"{self.name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        importlib.invalidate_caches()

    def add_patch(
        self,
        name: str = "0001-change.patch",
        *,
        edits: dict[str, tuple[str, str]] | None = None,
        before: dict[str, str] | None = None,
        drop: str | None = None,
        diff: str | None = None,
        version: str = "1.0",
        **fields: str,
    ) -> Path:
        """Write a patch and list it in the series.

        Args:
            edits: by module, the text to replace and its replacement.
            before: the module's text that the diff is against, where it is not the installed one.
            drop: a header field to leave out; `fields` are others, with "_" for "-".
            diff: the diff itself, instead of one made from `edits`.
        """
        header = HEADER | {key.replace("_", "-"): value for key, value in fields.items()}
        header.pop(drop or "", None)
        if diff is None:
            diff = "".join(
                self.diff(module, *edit, (before or {}).get(module, MODULE + "\n"))
                for module, edit in (edits or {"numbers": ("return 1", "return 10")}).items()
            )
        folder = self.root / f"{self.name}-{version}"
        folder.mkdir(exist_ok=True)
        text = "".join(f"{key}: {value}\n" for key, value in header.items()) + "\n" + diff
        (folder / name).write_text(text)
        with (folder / "series").open("a") as series:
            series.write(name + "\n")
        return folder / name

    def diff(self, module: str, old: str, new: str, text: str = MODULE + "\n") -> str:
        assert old in text
        path = f"{self.name}/{module}.py"
        after = text.replace(old, new)
        lines = difflib.unified_diff(
            text.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
        return "".join(lines)

    def session(self) -> Session:
        return Session(self.root)

    def install(self) -> Session:
        session = self.session()
        session.install()
        return session

    def load(self, module: str = "numbers"):
        return importlib.import_module(f"{self.name}.{module}")

    def snapshot(self) -> dict[str, bytes]:
        """Everything in site-packages but bytecode, by path."""
        return {
            str(file.relative_to(self.site_packages)): file.read_bytes()
            for file in self.site_packages.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }

    def forget(self) -> None:
        """As in a new process: nothing imported, no finder."""
        for module in [m for m in sys.modules if m.partition(".")[0] == self.name]:
            del sys.modules[module]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Session)]
        importlib.invalidate_caches()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePackage]:
    package = FakePackage(tmp_path)
    monkeypatch.syspath_prepend(str(package.site_packages))
    kept = [finder for finder in sys.meta_path if isinstance(finder, Session)]
    package.forget()
    yield package
    package.forget()
    linecache.clearcache()
    sys.meta_path[:0] = kept
