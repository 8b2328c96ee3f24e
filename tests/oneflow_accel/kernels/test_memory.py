"""Memory of tensors on the CPU: reused from step to step, and given back on request."""

from __future__ import annotations

import functools
import re
import resource
from pathlib import Path

from oneflow_accel import machine

import oneflow as flow
import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin
from tests.tolerances import assert_close

MEGABYTE = 2**20


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# 160 MB is more than malloc ever keeps by itself: such a block would be mapped at every step.
@pytest.mark.parametrize("megabytes", [1, 160])
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


def _measured(script: str, **env: str) -> dict[str, float]:
    result = run_process(["-c", script], env=env)
    assert result.returncode == 0, result.stdout
    return {
        k: float(v) for k, v in re.findall(r"^(\w+) (-?[\d.e+]+)$", result.stdout, re.MULTILINE)
    }


_SCRATCH = """
import ctypes
from oneflow_accel.kernels import plugin
import oneflow as flow
library = ctypes.CDLL(str(plugin.state().path))
library.oneflow_accel_scratch_bytes.restype = ctypes.c_int64
layer, x = flow.nn.Conv2d(32, 32, 3, padding=1), flow.rand(4, 32, 56, 56)
found = []
with flow.no_grad():
    first = layer(x).numpy()
    print("kept", library.oneflow_accel_scratch_bytes())
    library.oneflow_accel_release_scratch()
    print("released", library.oneflow_accel_scratch_bytes())
    print("equal", int((layer(x).numpy() == first).all()))
print("limit", plugin.state().scratch_limit)
"""


@needs_plugin
def test_scratch_memory_is_bounded() -> None:
    kept = _measured(_SCRATCH)
    assert kept["kept"] > MEGABYTE
    assert kept["released"] == 0
    assert kept["equal"] == 1
    assert kept["limit"] == machine.memory() // 16
    none = _measured(_SCRATCH, ONEFLOW_ACCEL_SCRATCH="0")
    assert none["kept"] == 0
    assert none["equal"] == 1
    assert none["limit"] == 0


# Whole images at a time: a batch too large for one copy of its activations.
@needs_plugin
def test_a_large_batch_in_parts_is_the_same_as_image_by_image() -> None:
    images = 12
    layer = flow.nn.Conv2d(16, 64, 3, padding=1)
    x = flow.rand(images, 16, 224, 224).requires_grad_()
    y = layer(x)
    y.backward(flow.ones_like(y))
    for i in (0, images // 2, images - 1):
        one = x[i : i + 1].detach().requires_grad_()
        z = layer(one)
        z.backward(flow.ones_like(z))
        assert_close(y[i : i + 1].numpy(), z.numpy(), reduced=144)
        assert_close(x.grad[i : i + 1].numpy(), one.grad.numpy(), reduced=576)


# Of more than any machine has, in eager mode twice and as a graph; of a container whose files say
# that little is left; and what runs after each.
_LACK = """
import ctypes
import oneflow_accel
from oneflow_accel.kernels import plugin
import numpy as np
import oneflow as flow
library = ctypes.CDLL(str(plugin.state().path))


class Graph(flow.nn.Graph):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def build(self, x):
        return (x + flow.zeros(self.numbers)).sum()


def limit(bytes):
    library.oneflow_accel_limit_memory(ctypes.c_int64(bytes), b"USAGE", b"STATISTICS", b"a", b"b")


for name, call in {
    "eager": lambda: flow.ones(2**45).sum(),
    "again": lambda: flow.ones(2**44).sum(),
    "graph": lambda: Graph(2**45)(flow.ones(1)),
    "operator": lambda: flow.ones(2**26).sum(),
    "array": lambda: flow.tensor(np.ones(2**26, np.float32)).sum(),
}.items():
    if name == "operator":
        limit(2**28)
    try:
        print(name, call().item())
    except RuntimeError as error:
        print(name, str(error)[str(error).find("out of memory"):])
    print(name, "then", int(flow.ones(1000).sum().item()))
limit(2**40)
print("at last", int(flow.ones(2**26).sum().item()))
"""


@needs_plugin
def test_a_lack_of_memory_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text(f"{2**27}\n")
    (tmp_path / "statistics").write_text(f"c 7\na {2**25}\nb {2**25}\n")
    files = {name.upper(): str(tmp_path / name) for name in ("usage", "statistics")}
    script = functools.reduce(lambda text, item: text.replace(*item), files.items(), _LACK)
    result = run_process(["-c", script])
    assert result.returncode == 0, result.stdout
    said = dict(re.findall(r"^(\w+) out of memory: (.*)$", result.stdout, re.MULTILINE))
    asked = {name: float(text.split()[0]) for name, text in said.items()}
    assert asked["eager"] == 2 * asked["again"] == 2**17, result.stdout
    assert asked["graph"] >= 2**17
    # What is used less what can be dropped are 64 of its 256 MiB, 8 are kept.
    left = "256 MiB were asked for, and 184 MiB of the container's 256 MiB are left; this process"
    assert left in said["operator"], result.stdout
    assert left in said["array"], result.stdout
    assert len(re.findall("then 1000$", result.stdout, re.MULTILINE)) == 5
    assert "at last 67108864" in result.stdout


@needs_plugin
def test_no_addresses_left_ends_the_process_with_a_sentence() -> None:
    script = (
        "import resource, oneflow_accel, oneflow as flow\n"
        "flow.ones(1).numpy()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)\n"
        "flow.ones(2**29).numpy()\n"
    )
    result = run_process(["-c", script])
    assert result.returncode == 2
    assert re.fullmatch(
        r"out of memory: 2\.0 GiB were asked for, and \d+ MiB of ulimit -v's [\d.]+ GiB are left; "
        r"this process holds \d+ MiB\n",
        result.stdout,
    ), result.stdout
