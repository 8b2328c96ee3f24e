"""Collectives of processes on one machine, through memory that they share."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path

from oneflow_accel.collectives import Mesh, _common_memory, _opened

import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin
WORKER = Path(__file__).with_name("collective_worker.py")


def found(folder: Path, processes: int, said: str = "", **env: str) -> list[dict]:
    result = run_distributed([WORKER, folder], processes, env=env)
    assert result.returncode == 0, result.stdout
    assert said in result.stdout
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


def test_all_take_oneflows_way_where_one_may_not_share(tmp_path: Path) -> None:
    said = "through TCP: ONEFLOW_ACCEL_SHARED_MEMORY=off on rank 1"
    for process in found(tmp_path, 2, said, OFF_ON_RANK="1"):
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


def test_a_window_that_cannot_be_made_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what this process tells them."""

    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    assert len(_common_memory(Mesh(1), 4096)) == 4096
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert _common_memory(Mesh(1), 4096) is None


def fails(tmp_path: Path, what: str) -> subprocess.CompletedProcess[str]:
    """What FAILURES does of that name, in two processes of a program that nothing watches."""
    program = tmp_path / "program.py"
    program.write_text(FAILURES)
    command = ["-m", "oneflow_accel.launch", "--nproc_per_node", "2", "--master_port", "auto"]
    return run_process([*command, program, what], timeout=60)


FAILURES = r"""
import ctypes, os, signal, subprocess, sys
WHAT, RANK = sys.argv[1], int(os.environ["RANK"])
if WHAT == "no plug-in" and RANK == 1:
    os.environ["ONEFLOW_ACCEL_PLUGIN"] = "off"
import oneflow_accel, oneflow as flow
from oneflow_accel import distributed
from oneflow_accel.kernels import plugin
if plugin.state().loaded:
    ctypes.CDLL(str(plugin.state().path)).oneflow_accel_set_patience(2)
ones = lambda size, dtype=flow.float32: flow.ones(size, dtype=dtype)

def all_gather(size):
    flow.comm.all_gather_into_tensor(flow.zeros(2 * size), flow.ones(size))

def reduce_scatter(size):
    flow.comm.reduce_scatter_tensor(flow.zeros(size), flow.ones(2 * size))

if WHAT == "different calls":
    size = 4 + 2 * RANK
    for call in (
        lambda: flow.comm.all_reduce(ones(size)),
        lambda: flow.comm.all_reduce(ones(size, flow.int8)),
        lambda: flow.comm.all_reduce(ones(100_000 * size, (flow.float32, flow.float64)[RANK])),
        lambda: all_gather(size),
        lambda: reduce_scatter(size),
        lambda: flow.comm.broadcast(ones(size), 0),
        lambda: flow.comm.broadcast(ones(4), RANK),
        lambda: (all_gather, reduce_scatter)[RANK](4),
    ):
        try:
            call()
            oneflow_accel.current_backend().synchronize()
        except RuntimeError as error:
            os.write(1, f"rank {RANK}: {error}\n".encode())
        # They can go on.
        number = ones(3)
        flow.comm.all_reduce(number)
        assert number.sum().item() == 6
    sys.exit()

number = ones(4)
if WHAT != "early":
    flow.comm.all_reduce(number)
    number.numpy()
if RANK == 1 and WHAT == "stops":
    subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
if RANK == 1 and WHAT in ("raises", "early"):
    raise ValueError("a bad batch")
if WHAT == "early":
    distributed.barrier()
flow.comm.all_reduce(number)
print(number.numpy())
"""


def test_different_calls_are_refused_on_all_processes(tmp_path: Path) -> None:
    ended = fails(tmp_path, "different calls")
    assert ended.returncode == 0, ended.stdout
    for number, rank in enumerate(("rank 0: ", "rank 1: ")):
        said = [line for line in ended.stdout.splitlines() if line.startswith(rank)]
        for line, calls in zip(said, DIFFERENT, strict=True):
            for part, place in zip(calls, (0, 1), strict=True):
                assert f"{part} on rank {place} (process " in line, ended.stdout
            # Its own first.
            assert line.index(calls[number]) <= line.index(calls[1 - number])


DIFFERENT = [
    ("all_reduce of 4 float32", "all_reduce of 6 float32"),
    ("all_reduce of 4 int8", "all_reduce of 6 int8"),
    ("all_reduce of 400000 float32", "all_reduce of 600000 float64"),
    ("all_gather of 4 float32", "all_gather of 6 float32"),
    ("reduce_scatter of 8 float32", "reduce_scatter of 12 float32"),
    ("broadcast of 4 float32 from rank 0", "broadcast of 6 float32 from rank 0"),
    ("broadcast of 4 float32 from rank 0", "broadcast of 4 float32 from rank 1"),
    ("all_gather of 4 float32", "reduce_scatter of 8 float32"),
]


@pytest.mark.parametrize("what", ["no plug-in", "raises", "early"])
def test_nobody_is_waited_for_in_vain(tmp_path: Path, what: str) -> None:
    """The launcher ends on the death of one of its processes; by then the other has said whom it
    waits for, or is not needed to."""
    ended = fails(tmp_path, what)
    assert ended.returncode != 0, ended.stdout
    waits = "rank 0 waits"
    if what == "no plug-in":
        assert f"rank 1 has no CPU kernels of oneflow_accel, for which {waits}" in ended.stdout
    else:
        assert "ValueError: a bad batch" in ended.stdout
        call = "1 float64" if what == "early" else "4 float32"
        assert f" has ended, and {waits} for it in all_reduce of {call}" in ended.stdout


def test_a_process_that_is_stopped_is_named(tmp_path: Path) -> None:
    ended = fails(tmp_path, "stops")
    assert ended.returncode == 0, ended.stdout
    assert re.search(
        r"rank 0 has waited 2 s for rank 1 \(process \d+\) in all_reduce of 4 float32", ended.stdout
    ), ended.stdout
    assert ended.stdout.count("[4. 4. 4. 4.]") == 2
