"""Importing libai loads nothing heavy that few programs use; what uses it still works."""

from __future__ import annotations

import pytest

from tests.launch import run_process
from tests.libai_projects.patches.partial_series import VARIABLE

SCRIPT = "tests.libai_projects.patches.late_imports"


@pytest.mark.parametrize(
    ("before", "loaded"),
    [("", ""), ("0027", " scipy.stats boto3 botocore requests regex flowvision")],
    ids=["with the patch", "without"],
)
def test_heavy_packages_are_loaded_where_they_are_used(before: str, loaded: str) -> None:
    process = run_process(["-m", SCRIPT], env={VARIABLE: before})
    assert process.returncode == 0, process.stdout
    assert [line for line in process.stdout.splitlines() if line[:6] in ("loaded", "works")] == [
        f"loaded{loaded}",
        "works",
    ]
