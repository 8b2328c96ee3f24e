"""After `pip install .`, which leaves libai out, each command names what adds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run_process

# Python runs it before anything else; the import system then has no libai.
HIDE = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "libai" else found(name, *rest)
"""
PROJECT = REPOSITORY / "libai_projects"


@pytest.mark.parametrize(
    "command",
    [
        [PROJECT / "tools" / "train_net.py"],
        [PROJECT / "projects" / "MagicPrompt" / "pipeline.py"],
        ["-c", "import libai_projects.projects.MagicPrompt.pipeline"],
    ],
    ids=lambda command: Path(command[-1]).name[:40],
)
def test_command_says_how_to_install_libai(tmp_path: Path, command: list[str | Path]) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    result = run_process(command, env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
    assert result.returncode == 1
    assert "libai is not installed. `pip install .` leaves it out" in result.stdout
    if command[0] != "-c":
        assert "Traceback" not in result.stdout
        assert "libai is not installed" in result.stdout.splitlines()[-1]
    # What make installs, to the letter.
    (steps,) = re.findall(r"this adds it: `(.*?)`", result.stdout)
    makefile = (REPOSITORY / "Makefile").read_text()
    (pinned,) = re.findall(r"^LIBAI := (\S+)$", makefile, re.MULTILINE)
    assert steps.split(" && ") == [
        "pip install -r requirements/build.txt",
        "pip install --no-build-isolation -r requirements/libai.txt",
        f"pip install --no-build-isolation --no-deps {pinned}",
    ]
    assert (REPOSITORY / "requirements" / "libai.txt").exists()
