"""Our GPT-2, whose tensors are global, cut over processes: trains as the whole one in one process
(fsdp_llama_spec B.4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.launch import run_distributed
from tests.libai_projects.train.sharded_worker import WAYS

WORKER = Path(__file__).with_name("sharded_worker.py")


def trained(folder: Path, processes: int, *ways: str) -> dict[str, dict[str, np.ndarray]]:
    result = run_distributed([WORKER, folder, *ways], processes, env={"ONEFLOW_ACCEL_THREADS": "1"})
    assert result.returncode == 0, result.stdout[-3000:]
    return {way: dict(np.load(folder / f"{way}.npz")) for way in ways}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return trained(tmp_path_factory.mktemp("whole"), 1, "whole")["whole"]


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], way: str) -> None:
    assert found.keys() == expected.keys(), way
    for name, value in expected.items():
        bound = 1e-6 if name in ("losses", "norms") else 1e-5
        assert abs(found[name] - value).max() < bound * abs(value).max(), (way, name)


def test_two_processes(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    found = trained(tmp_path, 2, *WAYS)
    kept = found.pop("with dropout, kept")
    # The masks are drawn twice.
    assert_same(found.pop("with dropout"), kept, "with dropout")
    assert abs(kept["losses"] - whole["losses"]).max() > 1e-3
    for way, run in found.items():
        assert_same(run, whole, way)
