"""The lint rules that are written here: device names, errors of one process, file sizes, lines per
package."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch import REPOSITORY


def script(name: str) -> ModuleType:
    """A script finds what lies beside it, as it does when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        return importlib.import_module(name)


literals = script("check_device_literals")
agreement = script("check_agreement")
sizes = script("check_file_size")
lines = script("size")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("ignored/\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('x = "cuda"', 'the string "cuda"'),
        ("x = 'mlu'", 'the string "mlu"'),
        ('x = "cuda:0"', 'the string "cuda:0"'),
        ('x = f"cuda:{rank}"', 'the string "cuda:"'),
        ("model.cuda()", ".cuda("),
        ("model.to(1).cuda(0)", ".cuda("),
        ("oneflow.cuda.synchronize()", "oneflow.cuda"),
        ("n = flow.cuda.device_count", "flow.cuda"),
        ("import oneflow.cuda", "import oneflow.cuda"),
        ("import oneflow.cuda.amp as a", "import oneflow.cuda.amp"),
        ("from oneflow.cuda import amp", "from oneflow.cuda import"),
        ("from oneflow import cuda", "from oneflow import"),
    ],
)
def test_flagged(source: str, what: str) -> None:
    (finding,) = literals.check_source("a.py", f"first = 1\n{source}\n")
    assert (finding.path, finding.line, finding.what) == ("a.py", 2, what)
    assert finding.escape is None


@pytest.mark.parametrize(
    "source",
    [
        'x = "cudagraph"',
        '"""Runs on cuda and mlu."""',
        "# device cuda",
        "x.is_cuda",
        "device.name == other.name",
        "import oneflow.cudalike",
        'x = "CUDA_VISIBLE_DEVICES"',
    ],
)
def test_not_flagged(source: str) -> None:
    assert literals.check_source("a.py", source) == []


def test_escape_needs_a_reason_and_only_counts_as_a_comment() -> None:
    (finding,) = literals.check_source("a.py", 'x = "cuda"  # device-literal: a file format')
    assert finding.escape == "a file format"
    (finding,) = literals.check_source("a.py", 'x = "cuda"  # device-literal:')
    assert finding.escape is None
    (finding,) = literals.check_source("a.py", 'x = ("cuda", "# device-literal: no comment")')
    assert finding.escape is None


def test_main_prints_places_and_counts_escapes(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository / "package" / "bad.py", "import oneflow as flow\nd = flow.device('cuda')\n")
    write(repository / "package" / "allowed.py", "D = 'mlu'  # device-literal: a patch header\n")
    write(repository / "oneflow_accel" / "backends" / "x.py", "NAME = 'cuda'\n")
    write(repository / "tests" / "test_x.py", "NAME = 'cuda'\n")
    write(repository / "ignored" / "x.py", "NAME = 'cuda'\n")
    assert literals.main(repository) == 1
    output = capsys.readouterr().out
    assert 'package/bad.py:2: the string "cuda": ask the backend instead' in output
    assert "device literals: 1 flagged, 1 allowed by a comment" in output
    assert "package/allowed.py:1: " in output
    assert "a patch header" in output
    (repository / "package" / "bad.py").unlink()
    assert literals.main(repository) == 0


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("if distributed.is_main():\n    raise A", [2]),
        ("if self._is_main and path:\n    try:\n        a()\n    except B:\n        raise C", [5]),
        ("if not is_main:\n    a()\nelse:\n    raise A", [4]),
        ("if is_main():\n    if is_main():\n        raise A", [3]),
        ("if is_main():\n    def read():\n        raise A\nraise B", []),
        ("def read():\n    if world_size() > 1:\n        raise A\non_rank_0(read)", []),
    ],
)
def test_what_one_process_raises_alone(source: str, lines: list[int]) -> None:
    assert agreement.check_source(source) == lines


def test_main_prints_where_one_process_raises(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository / "package" / "bad.py", "if is_main():\n    raise ValueError\n")
    assert agreement.main(repository) == 1
    assert capsys.readouterr().out.startswith("package/bad.py:2: raised on one process")
    (repository / "package" / "bad.py").unlink()
    assert agreement.main(repository) == 0


def test_file_size(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "fits.bin").write_bytes(b"x" * sizes.LIMIT_BYTES)
    write(repository / "ignored" / "big.bin", "x" * (sizes.LIMIT_BYTES + 1))
    assert sizes.main(repository) == 0
    (repository / "big.bin").write_bytes(b"x" * (sizes.LIMIT_BYTES + 1000))
    assert sizes.main(repository) == 1
    assert "big.bin: 501 kB is more than 500 kB" in capsys.readouterr().out


def test_lines_per_package(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BUDGETS", {"package": ("package", (".py",), 3)})
    write(repository / "package" / "a.py", "1\n2\n")
    write(repository / "package" / "notes.md", "1\n2\n")
    write(repository / "ignored" / "package" / "b.py", "1\n2\n")
    assert lines.main(repository) == 0
    write(repository / "package" / "c.py", "1\n2\n")
    assert lines.main(repository) == 1
    said = (
        "2 files       4 lines of       3       4 statements  over by 1\nPython without tests: 4 l"
    )
    assert said in capsys.readouterr().out
    monkeypatch.setattr(lines, "ALLOWANCES", ((7, "package", 1, "c.py"),))
    assert lines.main(repository) == 0
