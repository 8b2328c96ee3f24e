"""Collectives of processes on one machine, through memory that they share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from oneflow_accel.collectives import _opened

import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin
WORKER = Path(__file__).with_name("collective_worker.py")


def found(folder: Path, processes: int, **env: str) -> list[dict]:
    result = run_distributed([WORKER, folder], processes, env=env)
    assert result.returncode == 0, result.stdout
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 4])
def test_values_of_all_types_and_sizes(tmp_path: Path, processes: int) -> None:
    for rank in found(tmp_path, processes):
        assert rank["wrong"] == []
        # Of four processes also groups of two.
        assert rank["maps"] > (0 if processes == 2 else 1)
        assert rank["windows"] == rank["windows of rows"] == 2
        # What the others wrote: 16 MB each.
        assert rank["dropped"] > 0.9 * (processes - 1) * (1 << 24)
    assert not list(Path("/dev/shm").glob("oneflow_accel_*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_take_oneflows_way_where_one_may_not_share(tmp_path: Path, rank: int) -> None:
    for process in found(tmp_path, 2, OFF_ON_RANK=str(rank)):
        assert process["wrong"] == []
        assert process["maps"] == process["windows"] == process["windows of rows"] == 0


def test_a_window_is_made_of_no_other_file(tmp_path: Path) -> None:
    """In another container the same path can be another file."""
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    link = tmp_path / "link"
    link.symlink_to(other)
    assert _opened("oneflow_accel_1", str(link), 4096) is None
    assert _opened("oneflow_accel_1", str(tmp_path / "missing"), 4096) is None
    name = "oneflow_accel_2"
    file = os.memfd_create(name)
    os.truncate(file, 4096)
    path = f"/proc/{os.getpid()}/fd/{file}"
    assert len(_opened(name, path, 4096)) == 4096
    assert _opened(name, path, 8192) is None
    os.close(file)


def test_a_killed_process_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    """They sleep on its number; the watchdog ends them."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "import oneflow_accel, oneflow as flow\n"
        "from oneflow_accel import distributed, watchdog\n"
        "number = flow.ones(1)\n"
        "with watchdog.guard():\n"
        "    for step in range(10**9):\n"
        "        flow.comm.all_reduce(number)\n"
        "        number.numpy()\n"
        "        if step == 50 and distributed.rank() == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = ["-m", "oneflow_accel.launch", "--nproc_per_node", "2", "--master_port", "auto"]
    start = time.monotonic()
    process = run_process([*command, script], timeout=60)
    assert process.returncode != 0
    assert "SIGKILL" in process.stdout, process.stdout
    assert time.monotonic() - start < 40
