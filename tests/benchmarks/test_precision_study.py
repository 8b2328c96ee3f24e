"""benchmarks.precision: what it says of runs that are there, and of one that fails."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from benchmarks.precision import PRECISIONS
from tests.launch import run_process


def study(folder: Path, *options: str) -> tuple[int, str]:
    process = run_process(["-m", "benchmarks.precision", folder, *options], timeout=100)
    return process.returncode, process.stdout


def test_ends_are_compared_with_those_in_float32(tmp_path: Path) -> None:
    for precision, end in zip(PRECISIONS, (1.0, 1.005, 0.98), strict=True):
        run = tmp_path / f"ViT-Monarch-{precision}"
        lines = [("train", step, {"loss": 2 - (2 - end) * step / 20}) for step in range(1, 21)]
        lines.append(("val", 20, {"acc1": 98 + end}))
        run.mkdir()
        text = (json.dumps({"split": s, "step": n, "values": v}) for s, n, v in lines)
        (run / "metrics.jsonl").write_text("\n".join(text))
        (run / "done").touch()
        # The dense one as well: that of a folder is not trained again.
        run.rename(tmp_path / f"ViT-{precision}")
        (tmp_path / f"ViT-Monarch-{precision}").symlink_to(tmp_path / f"ViT-{precision}")
    code, text = study(tmp_path, "--mnist", str(tmp_path))
    assert code == 0, text
    # The mean of the last two of 20 losses.
    row = next(line for line in text.splitlines() if "ViT, Monarch  " in line)
    assert [part.strip() for part in row.split("│")[2:6]] == [
        *("1.0250", "1.0299", "1.0055", "+0.48% -1.90%")
    ]
    assert "+0.00 -0.02" in text, "top-1 in points"
    with Image.open(tmp_path / "precision.png") as picture:
        assert picture.width > picture.height > 300


def test_a_run_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    code, text = study(tmp_path, "--mnist", str(tmp_path / "nowhere"), "--steps", "1")
    assert code == 2
    assert "ViT-float32.log" in text
    assert "nowhere" in (tmp_path / "ViT-float32.log").read_text()


def test_without_data_nothing_is_trained(tmp_path: Path) -> None:
    code, text = study(tmp_path)
    assert code == 2
    assert "--photos" in text
