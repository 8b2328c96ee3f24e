"""Collectives on several processes; a rank of test_collectives.py writes what it found as JSON.

collective_worker.py FOLDER: rankR.json has a list of what was wrong, and milliseconds of a small
all-reduce.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

# What others are told when oneflow_accel is imported.
if os.environ.get("OFF_ON_RANK") == os.environ["RANK"]:
    os.environ["ONEFLOW_ACCEL_SHARED_MEMORY"] = "off"

from oneflow_accel import distributed
from oneflow_accel.backends import current_backend
from oneflow_accel.collectives import Mesh, Window

import numpy as np
import oneflow as flow

WORLD, RANK = distributed.world_size(), distributed.rank()
# A slot has 65,536 float32: none, some, a whole one, one more, several and a part.
SIZES = (1, 7, 65536, 65537, 300001)
TYPES = ("float32", "float64", "bfloat16", "int32", "int64", "int8")
wrong: list[str] = []


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    """Small whole numbers, whose sums every data type holds."""
    return (np.arange(size) % 5 + rank).astype(dtype)


def tensor(rank: int, size: int, dtype: str) -> flow.Tensor:
    """The same as a tensor; NumPy has no bfloat16."""
    if dtype == "bfloat16":
        return flow.tensor(values(rank, size, "float32")).bfloat16()
    return flow.tensor(values(rank, size, dtype))


def check(name: str, found: flow.Tensor, expected: np.ndarray) -> None:
    if found.dtype == flow.bfloat16:
        found = found.float()
    if not np.array_equal(found.numpy(), expected):
        wrong.append(name)


def check_all(dtype: str, size: int) -> None:
    own = tensor(RANK, size, dtype)
    kind = "float32" if dtype == "bfloat16" else dtype
    parts = [values(rank, size, kind) for rank in range(WORLD)]
    name = f"{dtype}, {size}: "
    whole = flow.zeros(WORLD * size, dtype=own.dtype)
    flow.comm.all_gather_into_tensor(whole, own)
    check(f"{name}all-gather", whole, np.concatenate(parts))
    root = tensor(RANK, size, dtype)
    flow.comm.broadcast(root, WORLD - 1)
    check(f"{name}broadcast", root, parts[-1])
    total = tensor(RANK, size, dtype)
    flow.comm.all_reduce(total)
    check(f"{name}all-reduce", total, sum(parts).astype(kind))
    piece = flow.zeros(size, dtype=own.dtype)
    flow.comm.reduce_scatter_tensor(piece, whole)
    check(f"{name}reduce-scatter", piece, (WORLD * parts[RANK]).astype(kind))


def check_rounding() -> None:
    """bfloat16 is rounded once, and not after each addition: 256 + 1 is 256."""
    total = flow.tensor([1.0 if RANK else 256.0]).bfloat16()
    flow.comm.all_reduce(total)
    expected = flow.tensor([256.0 + WORLD - 1]).bfloat16().float().numpy()
    check("sum of bfloat16, rounded once", total, expected)


def check_global() -> None:
    """What LiBai's layers do: sums, also over some of the processes, and other splits."""
    x = flow.tensor(values(RANK, 6 * WORLD, "float32"))
    placement = flow.placement("cpu", list(range(WORLD)))
    total = x.to_global(placement=placement, sbp=flow.sbp.partial_sum)
    expected = sum(values(rank, 6 * WORLD, "float32") for rank in range(WORLD))
    check("partial sum to broadcast", total.to_global(sbp=flow.sbp.broadcast).to_local(), expected)
    split = total.to_global(sbp=flow.sbp.split(0)).to_local()
    check("partial sum to split", split, expected[6 * RANK : 6 * (RANK + 1)])
    if WORLD == 4:
        # Two rows of two; rows have the same values, and are summed up column by column.
        square = flow.placement("cpu", [[0, 1], [2, 3]])
        rows = flow.tensor(values(RANK // 2, 6, "float32"))
        parts = rows.to_global(placement=square, sbp=[flow.sbp.partial_sum, flow.sbp.broadcast])
        both = parts.to_global(sbp=[flow.sbp.broadcast, flow.sbp.broadcast]).to_local()
        check("sums of columns", both, values(0, 6, "float32") + values(1, 6, "float32"))


def check_windows(mesh: Mesh) -> int:
    """In each round all write the round's number, and read it of all; how many windows there are.
    A matmul before the reading and a pause before the writing make whoever does not wait wrong."""
    lengths = (3, 70_000)
    made = [Window.of(mesh, lengths, flow.device("cpu")) for _ in range(2)]
    windows = [window for window in made if window is not None]
    for number in range(10):
        time.sleep(0.01 * ((number + RANK) % 2))
        for window in windows:
            for index in range(len(lengths)):
                window.own(index).fill_(float(100 * number + RANK))
        Window.meet(windows)
        work = flow.randn(300, 300) @ flow.randn(300, 300)
        ranks = [RANK - mesh.place + place for place in range(mesh.shards)]
        for window in windows:
            for index, length in enumerate(lengths):
                whole = window.whole(index) + 0 * work[0, 0]
                expected = np.repeat([100.0 * number + rank for rank in ranks], length)
                check(f"window of a row of {mesh.shards}, round {number}", whole, expected)
        Window.meet(windows)
    return len(windows)


def dropped_bytes(mesh: Mesh) -> int:
    """By how much this process is smaller after `drop`; the values are still there."""
    window = Window.of(mesh, [1 << 22], flow.device("cpu"))
    if window is None:
        return 0
    window.own(0).fill_(1.0)
    Window.meet([window])
    window.whole(0).sum().numpy()
    before = current_backend().memory_allocated()
    window.drop()
    flow._oneflow_internal.eager.Sync()
    after = current_backend().memory_allocated()
    check("after drop", window.whole(0).sum(), np.array(mesh.shards * float(1 << 22)))
    return before - after


def seconds_of_small() -> float:
    number, times = flow.ones(1), []
    for _ in range(20):
        start = time.perf_counter()
        flow.comm.all_reduce(number)
        number.numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


for dtype in TYPES:
    if dtype == "bfloat16" and "OFF_ON_RANK" in os.environ:
        continue  # OneFlow has no sums of it on CPUs.
    for size in SIZES:
        check_all(dtype, size)
check_global()
if "OFF_ON_RANK" not in os.environ:
    check_rounding()
maps = Path("/proc/self/maps").read_text().count("/memfd:oneflow_accel ")
found = {"wrong": wrong, "maps": maps, "seconds": seconds_of_small()}
found["windows"] = check_windows(Mesh.of())
found["windows of rows"] = check_windows(Mesh.of(2))
found["dropped"] = dropped_bytes(Mesh.of())
Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(found))
