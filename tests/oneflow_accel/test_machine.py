"""What a process may use: in control groups of both versions, on cores with hardware threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from oneflow_accel import machine

import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

GIB = 2**30
# Eight processors, of which 0 and 4, 1 and 5, ... are one core's.
PROCESSORS = set(range(8))
V2 = "30 20 0:26 {base} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
CPU = "31 20 0:27 {base} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "32 20 0:28 {base} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
OTHERS = "22 1 8:1 / / rw - ext4 /dev/sda rw\n29 20 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
V1 = "4:cpu,cpuacct:{path}\n3:memory:{path}\n1:name=systemd:{path}\n"

# /proc/self/mountinfo, /proc/self/cgroup, other files; then cores and GiB.
CASES = {
    "no groups": ("", "", {}, 4, 64),
    "2, no limit": (V2, "0::/a\n", {"a/cpu.max": "max 100000", "a/memory.max": "max"}, 4, 64),
    "2, half a CPU": (V2, "0::/a\n", {"a/cpu.max": "50000 100000"}, 1, 64),
    "2, docker --cpus=2": (V2, "0::/\n", {"cpu.max": "200000 100000"}, 2, 64),
    "2, more than there is": (V2, "0::/a\n", {"a/cpu.max": "900000 100000"}, 4, 64),
    "2, a level above": (
        V2,
        "0::/a/b/c\n",
        {"a/cpu.max": "250000 100000", "a/b/c/cpu.max": "max 100000", "a/b/memory.max": 3 * GIB},
        3,
        3,
    ),
    "2, seen from outside": (
        V2.replace("{base}", "/docker/1"),
        "0::/docker/1\n",
        {"cpu.max": "100000 100000", "memory.max": 2 * GIB},
        1,
        2,
    ),
    "2, a name space's parent": (V2, "0::/../other\n", {"cpu.max": "300000 100000"}, 3, 64),
    "1, no limit": (
        CPU + MEMORY,
        V1.format(path="/a"),
        {"cpu,cpuacct/a/cpu.cfs_quota_us": -1, "memory/a/memory.limit_in_bytes": 2**63 - 4096},
        4,
        64,
    ),
    "1, docker": (
        (CPU + MEMORY).replace("{base}", "/docker/1"),
        V1.format(path="/docker/1"),
        {
            "cpu,cpuacct/cpu.cfs_quota_us": 150000,
            "cpu,cpuacct/cpu.cfs_period_us": 100000,
            "memory/memory.limit_in_bytes": 5 * GIB,
        },
        2,
        5,
    ),
    "1, a level above": (
        CPU + MEMORY,
        V1.format(path="/a/b"),
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": 50000,
            "cpu,cpuacct/a/cpu.cfs_period_us": 50000,
            "memory/a/memory.limit_in_bytes": 7 * GIB,
            "memory/a/b/memory.limit_in_bytes": 8 * GIB,
        },
        1,
        7,
    ),
    "both, as systemd's hybrid": (
        CPU + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        V1.format(path="/a") + "0::/a\n",
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": 100000,
            "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            "unified/a/memory.max": 9 * GIB,
        },
        1,
        9,
    ),
}


def tree(root: Path, mounts: str, groups: str, files: dict[str, object]) -> None:
    contents: dict[str, object] = {
        "proc/self/mountinfo": OTHERS + mounts.replace("{base}", "/"),
        "proc/self/cgroup": groups,
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n",
        **{f"sys/fs/cgroup/{name}": content for name, content in files.items()},
    }
    for cpu in PROCESSORS:
        siblings = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        contents[siblings] = f"{cpu % 4},{cpu % 4 + 4}"
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: PROCESSORS)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_quotas_and_limits(tmp_path: Path, case: tuple) -> None:
    mounts, groups, files, cores, gibibytes = case
    tree(tmp_path, mounts, groups, files)
    assert machine.cores(tmp_path) == cores
    assert machine.memory(tmp_path) == gibibytes * GIB
    assert all(limit.bytes <= 9 * GIB for limit in machine.limits(tmp_path))


def test_cores_are_those_that_it_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, "", "", {})
    for processors, cores in ({0, 4}, 1), ({0, 1}, 2), ({1, 4, 5}, 2), ({17, 18, 19}, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, these=processors: these)
        assert machine.cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("mounts", "names"),
    [
        (V2, ("memory.max", "memory.current", "")),
        (MEMORY, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")),
    ],
    ids=["2", "1"],
)
def test_free_memory_is_what_the_group_has_left(tmp_path: Path, mounts: str, names: tuple) -> None:
    limit, used, total = names
    folder = "memory/a" if mounts == MEMORY else "a"
    files: dict[str, object] = {
        f"{folder}/{limit}": 8 * GIB,
        f"{folder}/{used}": 6 * GIB,
        f"{folder}/memory.stat": f"anon 5\n"
        f"{total}inactive_file {GIB // 4}\n{total}active_file {3 * GIB // 4}",
    }
    tree(tmp_path, mounts, "0::/a\n3:memory:/a\n", files)
    assert machine.free_memory(tmp_path) == 3 * GIB
    tree(tmp_path, mounts, "0::/a\n3:memory:/a\n", {f"{folder}/{used}": 10 * GIB})
    assert machine.free_memory(tmp_path) == 0
    assert machine.free_memory(tmp_path / "nothing") is None


@contextlib.contextmanager
def real_group(controller: str, file: str, number: int) -> Iterator[str]:
    """A control group with a limit; the code by which a process enters it."""
    group = Path("/sys/fs/cgroup", controller, f"oneflow_accel_{uuid.uuid4().hex}")
    try:
        group.mkdir()
        (group / file).write_text(str(number))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    finally:
        group.rmdir()


def test_a_real_quota_is_the_kernels_number_of_threads() -> None:
    command = "from oneflow_accel.__main__ import main; main(['--json'])"
    with real_group("cpu", "cpu.cfs_quota_us", 50000) as enter:
        process = run_process(["-c", enter + command], env={"ONEFLOW_ACCEL_THREADS": ""})
    assert json.loads(process.stdout)["threads"] == {"cores": 1, "plugin": 1}


@needs_plugin
def test_a_command_in_a_full_container_says_what_there_is() -> None:
    code = (
        "import sys, oneflow_accel, oneflow as flow\n"
        "from oneflow_accel import command\n"
        "act = lambda: print([flow.ones(2**22) for _ in range(99)][-1].sum().item())\n"
        "sys.exit(command.run('act.py', act, 'take less'))\n"
    )
    with real_group("memory", "memory.limit_in_bytes", GIB) as enter:
        process = run_process(["-c", enter + code])
    assert process.returncode == 2, process.stdout
    assert re.search(
        r"^act.py: error: out of memory: \d\d MiB were asked for, and \d+ MiB of the container's "
        r"1.0 GiB are left; this process holds .* [GM]iB; take less$",
        process.stdout,
        re.MULTILINE,
    ), process.stdout


def test_a_launcher_says_whose_kill_it_was(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    for how, said in {
        "b'x' * 2**30": r"SIGKILL \(a process came to hold [\d.]+ GiB, of 0.5 GiB for all: memory",
        "os.kill(os.getpid(), 9)": "SIGKILL; the other",
    }.items():
        program.write_text(f"import os\n{how}\n")
        arguments = ["-m", "oneflow_accel.launch", "--master_port", "auto", str(program)]
        start = f"import os, sys\nos.execv(sys.executable, [sys.executable, *{arguments!r}])"
        with real_group("memory", "memory.limit_in_bytes", GIB // 2) as enter:
            process = run_process(["-c", enter + start])
        assert process.returncode == 137, process.stdout
        assert re.search(f"rank 0 was ended by {said}", process.stdout), process.stdout


@pytest.mark.parametrize(
    ("mounts", "files", "kills"),
    [
        (V2, {"a/memory.events": "oom 4\noom_kill 2", "memory.events": "oom_kill 1"}, 3),
        (MEMORY, {"memory/a/memory.oom_control": "under_oom 0\noom_kill 5"}, 5),
        ("", {}, 7),
    ],
    ids=["2", "1", "no groups"],
)
def test_kills_for_memory_are_counted(tmp_path: Path, mounts: str, files: dict, kills: int) -> None:
    tree(tmp_path, mounts, "0::/a\n3:memory:/a\n", files)
    (tmp_path / "proc/vmstat").write_text("nr_free 3\noom_kill 7\n")
    assert machine.memory_kills(tmp_path) == kills
    assert machine.memory_kills(tmp_path / "nothing") is None
