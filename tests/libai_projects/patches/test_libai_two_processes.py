"""What the patches of libai mend that only several processes show."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from tests.launch import run_distributed
from tests.libai_projects.patches.partial_series import VARIABLE
from tests.modes import only_all


def run(*names: str, before: str = "") -> CompletedProcess[str]:
    args = ["-m", "tests.libai_projects.patches.two_process_cases", *names]
    return run_distributed(args, 2, timeout=140, env={VARIABLE: before})


def test_masks_and_labels_on_two_processes() -> None:
    process = run("masks", "labels")
    assert process.returncode == 0, process.stdout
    assert "holds: masks" in process.stdout
    assert "holds: labels" in process.stdout


@only_all
@pytest.mark.parametrize(
    ("name", "patch", "text"),
    [
        ("labels", "0006-data-parallel-rank", "AssertionError"),
        ("pipeline_graph", "0005-graph-variables", "separated_header_mem_ptr"),
    ],
)
def test_fails_on_two_processes_without_the_patch(name: str, patch: str, text: str) -> None:
    process = run(name, before=patch)
    assert process.returncode != 0
    assert text in process.stdout
