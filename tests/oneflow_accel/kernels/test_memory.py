"""Memory of tensors on the CPU: reused from step to step, and given back on request."""

from __future__ import annotations

import re
import resource

import oneflow as flow
import pytest

from tests.launch import run_process

MEGABYTE = 2**20


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# 160 MB is more than malloc ever keeps by itself: such a block would be mapped at every step.
@pytest.mark.parametrize("megabytes", [1, 20, 160])
def test_outputs_reuse_memory_without_page_faults(megabytes: int) -> None:
    x = flow.zeros(megabytes * MEGABYTE // 4)
    for _ in range(3):
        flow.relu(x)
    flow._oneflow_internal.eager.Sync()
    before = _page_faults()
    for _ in range(10):
        flow.relu(x)
    flow._oneflow_internal.eager.Sync()
    pages = megabytes * MEGABYTE / resource.getpagesize()
    assert _page_faults() - before < max(64, pages)


# In a process of its own: what other tests have left would count.
_RETURN = """
import oneflow_accel
import oneflow as flow

backend = oneflow_accel.select_device("cpu")


def allocate_and_drop():
    tensors = [flow.ones(size * 2**18) for size in (5, 10, 20, 5, 10, 20, 30)]
    del tensors
    backend.synchronize()
    backend.empty_cache()
    return backend.memory_allocated()


# malloc keeps freed blocks after it has seen large ones.
before = allocate_and_drop()
print("kept", allocate_and_drop() - before)
"""


def test_empty_cache_returns_memory_to_the_system() -> None:
    result = run_process(["-c", _RETURN])
    kept = re.search(r"^kept (-?\d+)$", result.stdout, re.MULTILINE)
    assert kept, result.stdout
    assert int(kept[1]) < 20 * MEGABYTE
