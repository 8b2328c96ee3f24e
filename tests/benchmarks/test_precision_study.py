"""benchmarks.precision: what it says of runs that are there, and of one that fails."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import precision


@pytest.fixture
def study(tmp_path: Path, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """The command in a folder, with options: its exit code and what it says."""

    def run(*options: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["precision", str(tmp_path), *map(str, options)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(precision.__file__, run_name="__main__")
        return end.value.code, "".join(capsys.readouterr())

    return run


def test_ends_are_compared_with_those_in_float32(tmp_path: Path, study) -> None:
    for name, end in zip(precision.PRECISIONS, (1.0, 1.005, 0.98), strict=True):
        run = tmp_path / f"ViT-Monarch-{name}"
        lines = [("train", step, {"loss": 2 - (2 - end) * step / 20}) for step in range(1, 21)]
        lines.append(("val", 20, {"acc1": 98 + end}))
        run.mkdir()
        text = (json.dumps({"split": s, "step": n, "values": v}) for s, n, v in lines)
        (run / "metrics.jsonl").write_text("\n".join(text))
        (run / "done").touch()
        # The dense one as well: that of a folder is not trained again.
        run.rename(tmp_path / f"ViT-{name}")
        (tmp_path / f"ViT-Monarch-{name}").symlink_to(tmp_path / f"ViT-{name}")
    code, text = study("--mnist", tmp_path)
    assert code == 0, text
    # The mean of the last two of 20 losses.
    row = next(line for line in text.splitlines() if "ViT, Monarch  " in line)
    assert [part.strip() for part in row.split("│")[2:6]] == [
        *("1.0250", "1.0299", "1.0055", "+0.48% -1.90%")
    ]
    assert "+0.00 -0.02" in text, "top-1 in points"
    with Image.open(tmp_path / "precision.png") as picture:
        assert picture.width > picture.height > 300


def test_a_run_that_fails_is_named_with_its_log(tmp_path: Path, study) -> None:
    code, text = study("--mnist", tmp_path / "nowhere", "--steps", 1)
    assert code == 2
    assert "ViT-float32.log" in text
    assert "nowhere" in (tmp_path / "ViT-float32.log").read_text()
    # Without data nothing is trained.
    code, text = study()
    assert code == 2
    assert "--photos" in text
