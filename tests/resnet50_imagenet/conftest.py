"""A small ImageFolder, and main.py as a user calls it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_server import CommandServer
from tests.launch import REPOSITORY, run_distributed, run_process

MAIN = REPOSITORY / "resnet50_imagenet" / "main.py"
CLASSES = ("disk", "square", "stripes")
TRAIN_PER_CLASS, VAL_PER_CLASS = 32, 7

# The smallest run that has everything: BatchNorm, momentum, several epochs of few steps.
SMALL = ("-a", "shufflenet_v2_x0_5", "--image-size", "32", "-b", "8", "-j", "0", "--lr", "0.001")
SMALL += ("--seed", "3", "-p", "1")


def draw(kind: str, random: np.random.Generator) -> Image.Image:
    """A 40 x 48 picture of one of CLASSES, of a random color, on noise."""
    rows, columns = np.mgrid[0:40, 0:48]
    inside = {
        "disk": (rows - 20) ** 2 + (columns - 24) ** 2 < 150,
        "square": (abs(rows - 20) < 10) & (abs(columns - 24) < 10),
        "stripes": rows % 8 < 4,
    }[kind]
    pixels = random.integers(0, 60, size=(40, 48, 3))
    pixels[inside] += random.integers(80, 190, size=3)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    random = np.random.default_rng(0)
    for split, count in (("train", TRAIN_PER_CLASS), ("val", VAL_PER_CLASS)):
        for kind in CLASSES:
            folder = root / split / kind
            folder.mkdir(parents=True)
            for index in range(count):
                draw(kind, random).save(folder / f"{index:03d}.png")
    return root


RunMain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def server() -> Iterator[CommandServer]:
    with CommandServer("resnet50_imagenet.main") as running:
        yield running


@pytest.fixture(scope="session")
def run_main(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> RunMain:
    """Calls main.py from another folder; in its own process for `fresh`, `env`, `processes` > 1."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run(
        *args: str | Path,
        processes: int = 1,
        ok: bool = True,
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        if processes > 1:
            args = (MAIN, "--multiprocessing-distributed", *args)
            result = run_distributed(args, processes, timeout=240, env=env, cwd=elsewhere)
        elif fresh or env:
            result = run_process([MAIN, *args], timeout=240, env=env, cwd=elsewhere)
        else:
            result = server.run(args, timeout=240, cwd=elsewhere)
        assert (result.returncode == 0) == ok, result.stdout
        return result

    return run


def losses(output_dir: Path, split: str = "train") -> dict[int, float]:
    """Loss by step, from the run's metrics.jsonl."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["step"]: entry["values"]["loss"] for entry in entries if entry["split"] == split}
