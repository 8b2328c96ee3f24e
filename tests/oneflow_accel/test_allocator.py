"""Whose `new` the C++ objects of operations come from."""

from __future__ import annotations

from oneflow_accel import settings

import pytest

from tests.launch import run_process

# Objects of tensors that are kept are mimalloc's, whose memory grows with them.
KEEP_TENSORS = """
import ctypes
FIRST
import oneflow as flow
from oneflow_accel import allocator

def held():
    found = [ctypes.c_size_t() for _ in range(8)]
    mimalloc.mi_process_info(*map(ctypes.byref, found))
    return found[5].value

print("in use:", allocator.in_use())
if allocator.in_use() == "mimalloc":
    mimalloc = ctypes.CDLL(None)
    before = held()
    tensors = [flow.ones(1) + 1 for _ in range(20_000)]
    print("grew:", held() - before > 20_000 * 200)
"""


def printed(first: str, **environment: str) -> str:
    code = KEEP_TENSORS.replace("FIRST", first)
    process = run_process(["-c", code], timeout=120, env=environment)
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_objects_of_tensors_are_mimallocs() -> None:
    assert "in use: mimalloc\ngrew: True" in printed("import oneflow_accel")


@pytest.mark.parametrize(
    ("first", "environment"),
    [
        ("import oneflow; import oneflow_accel", {}),
        ("import oneflow_accel", {settings.ALLOCATOR.name: "glibc"}),
    ],
    ids=["oneflow first", "switched off"],
)
def test_glibcs_where_it_is_too_late_or_asked_for(first: str, environment: dict[str, str]) -> None:
    assert "in use: glibc" in printed(first, **environment)
