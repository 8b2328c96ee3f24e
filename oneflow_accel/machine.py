"""Cores and memory that this process may use, in a container not the machine's; installed files.

A control group (cgroups(7)) limits its processes and those of the groups below it. Both versions
are read, at every level that can be seen. `root` is where /proc and /sys are, for tests.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Bytes that stand for no limit in the first version: the largest number of whole pages.
_UNLIMITED = 2**60


def cores(root: Path = _ROOT) -> int:
    """How many threads can compute at once, at least 1: physical cores among those that this
    process may run on, as the hardware threads of a core share its arithmetic, or fewer where a
    quota gives it less time. Part of a core counts as one."""
    topology = root / "sys/devices/system/cpu"
    siblings = (
        (cpu, _read(topology / f"cpu{cpu}/topology/thread_siblings_list"))
        for cpu in os.sched_getaffinity(0)
    )
    physical = {known or str(cpu) for cpu, known in siblings}
    quotas = [_quota(group) for group in groups("cpu", root)]
    return max(1, math.ceil(min([len(physical), *quotas])))


@dataclass(frozen=True)
class Limit:
    """What a group's processes may have of memory together: bytes; the files that say how much they
    use and what for, and there the names of what the kernel drops where memory is needed: pages of
    files."""

    bytes: int
    usage: Path
    statistics: Path
    droppable: tuple[str, str]


def limits(root: Path = _ROOT) -> list[Limit]:
    """Those of this process's groups, the least first."""
    found = []
    for group in groups("memory", root):
        first = not (group / "memory.max").exists()
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if first else ("max", "current", "")
        most, usage, of_all = names
        text = _read(group / f"memory.{most}")
        if text not in ("", "max") and int(text) < _UNLIMITED:
            droppable = f"{of_all}inactive_file", f"{of_all}active_file"
            files = group / f"memory.{usage}", group / "memory.stat"
            found.append(Limit(int(text), *files, droppable))
    return sorted(found, key=lambda limit: limit.bytes)


def memory(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may come to have, together with others of its groups."""
    return int(min([_memory_info(root, "MemTotal"), *(limit.bytes for limit in limits(root))]))


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that it can still get, None where the system does not say; Linux promises more than it
    has, and kills the process that uses it."""
    free = [_memory_info(root, "MemAvailable")]
    for limit in limits(root):
        statistics = dict(line.split() for line in _read(limit.statistics).splitlines())
        dropped = sum(int(statistics.get(name, "0")) for name in limit.droppable)
        free.append(max(0.0, limit.bytes - int(_read(limit.usage) or "0") + dropped))
    least = min(free)
    return None if least == math.inf else int(least)


def memory_kills(root: Path = _ROOT) -> int | None:
    """How often the kernel has killed a process of these groups, or without groups any one, because
    memory had run out; None where the system does not say."""
    names = "memory.events", "memory.oom_control"
    texts = [_read(group / name) for group in groups("memory", root) for name in names]
    for text in "\n".join(texts), _read(root / "proc/vmstat"):
        if counts := re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return sum(map(int, counts))
    return None


def groups(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """The folders of this process's control group for "cpu" or "memory", and of those above it."""
    of_process = [line.split(":", 2)[1:] for line in _read(root / "proc/self/cgroup").splitlines()]
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split()[:3]
        if kind == "cgroup2":
            paths = [path for names, path in of_process if not names]
        elif kind == "cgroup" and controller in options.split(","):
            paths = [path for names, path in of_process if controller in names.split(",")]
        else:
            continue
        base, place = mount.split()[3:5]
        for path in paths:
            # A container may see its own group where the mount begins, and not where that is.
            below = os.path.relpath(path, base)
            top = root / place.lstrip("/")
            folder = top if below.startswith("..") else top / below
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def installed_file(package: str, pattern: str) -> Path | None:
    """The file of an installed package that matches the pattern."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((file for file in files if file.match(pattern)), None)
    return None if found is None else Path(str(found.locate())).resolve()


def _quota(group: Path) -> float:
    """Cores whose time the group's processes get together."""
    limit = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us"),
        _read(group / "cpu.cfs_period_us"),
    ]
    unlimited = limit[0] in ("", "max", "-1")
    return math.inf if unlimited else int(limit[0]) / int(limit[1])


def _memory_info(root: Path, name: str) -> float:
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, amount = line.partition(":")
        if key == name:
            return int(amount.split()[0]) * 1024
    return math.inf


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
