"""Small eager operations: nothing sleeps between them, and one thread runs them; both by counts."""

from __future__ import annotations

import json

import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin

# Runs with what a program has that imports oneflow_accel and does nothing else. A thread that
# sleeps is not switched to; the threads that one operation has made are all that OneFlow has.
PROGRAM = """
import ctypes, json, os, pathlib, time
{environment}
{imports}
from oneflow_accel.kernels import plugin
import numpy as np

TASKS = pathlib.Path("/proc/self/task")
naps = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_naps
naps.restype = ctypes.c_int64

def switches(thread):
    status = (TASKS / thread / "status").read_text()
    return [int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line]

def asleep(threads):
    # A new thread may not have come to its wait yet.
    states = [(TASKS / thread / "status").read_text() for thread in threads]
    return all("State:\\tS" in state for state in states)

before = set(os.listdir(TASKS))
x = flow.ones(16)
made = sorted(set(os.listdir(TASKS)) - before)
flow._oneflow_internal.eager.Sync()
deadline = time.monotonic() + 30
while not asleep(made) and time.monotonic() < deadline:
    time.sleep(0.05)
idle = [switches(thread) for thread in made]
y = x
for _ in range(1000):
    y = y + 1.0
result = y[0].item()
worked = [switches(thread) for thread in made] != idle
eager = naps()

class Products(flow.nn.Graph):
    def build(self, x):
        y = x
        for _ in range(20):
            y = flow.matmul(y, x)
        return y

graph, x = Products(), flow.tensor(np.eye(512, dtype=np.float32))
graph(x).numpy()
print("found", json.dumps([result, eager, len(made), worked, naps() - eager]))
"""
VARIABLE = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"
# This process has it from its own import.
NOT_INHERITED = f"import os; os.environ.pop('{VARIABLE}', None)\n"
FIRST = "import oneflow_accel, oneflow as flow"
LAST = "import oneflow as flow, oneflow_accel"
CHOSEN = FIRST + "\noneflow_accel.select_device()"


@pytest.mark.parametrize(("imports", "worker"), [(FIRST, True), (LAST, False), (CHOSEN, False)])
def test_nothing_sleeps_in_a_chain_of_small_operations(imports: str, worker: bool) -> None:
    environment = f"os.environ['{VARIABLE}'] = '1'" if worker else NOT_INHERITED
    process = run_process(["-c", PROGRAM.format(environment=environment, imports=imports)])
    assert process.returncode == 0, process.stdout
    line = next(line for line in process.stdout.splitlines() if line.startswith("found "))
    result, eager, made, worker_ran, graph = json.loads(line.removeprefix("found "))
    assert result == 1001.0
    assert eager == 0
    # OneFlow's worker thread is made in any case, and runs what it is given.
    assert made == 1
    assert worker_ran is worker
    # 5 GFLOP take more than 10 ms on two cores, and no nap is longer than 0.5 ms.
    assert graph >= 10


def test_the_worker_thread_is_used_where_another_device_is_expected() -> None:
    """The variable holds for the whole process."""
    script = NOT_INHERITED + (
        "from oneflow_accel.backends import registry\n"
        f"name = '{VARIABLE}'\n"
        "print('at import', os.environ.pop(name, None))\n"
        "class Other: prepare = lambda self: None\n"
        "registry.resolve = lambda: registry.Selection(Other(), 'expected')\n"
        "registry.resolve().backend.prepare()\n"
        "print('other', os.environ.get(name))\n"
    )
    process = run_process(["-c", script])
    assert "at import 0" in process.stdout
    assert "other None" in process.stdout
    asked = run_process(["-c", script], env={"ONEFLOW_ACCEL_DEVICE": "no-such-device"})
    assert "at import None" in asked.stdout
