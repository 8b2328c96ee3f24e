"""What each patch against oneflow mends: the failure without it, the success with it.

Each case is a process, as oneflow is imported only once in each. Devices that this machine lacks
are faked where the vendor's code begins: operators without a kernel.
"""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import CompletedProcess

from oneflow_accel import settings
from oneflow_accel.kernels import plugin

import pytest

from tests.launch import REPOSITORY, run_distributed, run_process

# What has no CPU kernel in its place, for oneflow's own error.
NO_TOUCH_KERNEL = """
flow._C.stream_touch = lambda tensors: flow._C.gelu(flow.ones(2).int())
"""
LOST_DEVICE = """
def stream_touch(tensors):
    raise RuntimeError("the device is lost")
flow._C.stream_touch = stream_touch
"""
DROPOUT = """
import oneflow_accel
import oneflow as flow
layers = [flow.nn.Dropout(0.5) for _ in range(2)]
def masks(seed):
    flow.manual_seed(seed)
    return [layer(flow.ones(64)).numpy().tolist() for layer in layers]
first = masks(1)
print("dropout", masks(1) == first, first[0] != first[1])
"""
GRAPH_BLOCKS = """
import oneflow_accel
import oneflow as flow
class Configured(flow.nn.Linear):
    config = "its own"
graph = flow.nn.Graph()
graph.model = flow.nn.Sequential(flow.nn.Linear(2, 2), Configured(2, 2))
plain, configured = graph.model
plain.config.stage_id = plain.weight.config.stage_id = 1
stages = plain.config.stage_id, plain.weight.config.stage_id
print("blocks", type(plain.origin).__name__, stages, configured.config)
"""
GRAPH_THREADS = """
import oneflow_accel
import oneflow as flow
class AddOne(flow.nn.Graph):
    def build(self, x):
        return x + 1
AddOne()(flow.ones(2))
session = flow.framework.session_context.GetDefaultSession()
print("threads", session.resource.cpu_device_num)
"""
DDP = """
import hashlib
import numpy as np
import oneflow_accel
import oneflow as flow
{fake}
rank = flow.env.get_rank()
flow.manual_seed(0)
model = flow.nn.Sequential(flow.nn.Linear(6, 8), flow.nn.BatchNorm1d(8), flow.nn.Linear(8, 3))
model = flow.nn.parallel.DistributedDataParallel(model)
optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = np.random.default_rng(rank)
for step in range(5):
    loss = model(flow.tensor(data.normal(size=(4, 6)).astype(np.float32))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(value.numpy().tobytes())
    print("trained", digest.hexdigest())
"""
LAYER_NORM = """
import numpy as np
import oneflow_accel
import oneflow as flow
from oneflow_accel.backends.cpu import CpuBackend

def var(*args, **kwargs):
    raise RuntimeError("Cannot find the kernel matching Current OperatorConf: var")

def layer_norm_affine(x, weight, bias, *, begin_norm_axis, begin_params_axis, epsilon):
    assert begin_norm_axis == begin_params_axis == 1
    x, axes = x.numpy(), (1, 2)
    x = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)
    return flow.tensor(x * weight.numpy() + bias.numpy())

CpuBackend._why_not = lambda self, feature: None
flow.Tensor.var = var
flow._C.layer_norm_affine = layer_norm_affine
flow._C.layer_norm = lambda x, **attributes: layer_norm_affine(
    x, flow.ones(4, 5), flow.zeros(4, 5), **attributes
)
x = flow.tensor(np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32))
for affine in (True, False):
    y = flow.nn.LayerNorm((4, 5), elementwise_affine=affine)(x).numpy()
    assert abs(y.mean((1, 2))).max() < 1e-5 and abs(y.std((1, 2)) - 1).max() < 1e-3
y = flow.nn.functional.layer_norm(x, (4, 5)).numpy()
assert abs(y.std((1, 2)) - 1).max() < 1e-3
print("normalized")
"""
PLAIN_LAYER_NORM = """
import hashlib
import numpy as np
import oneflow_accel
import oneflow as flow
from oneflow_accel.backends.cpu import CpuBackend

data = np.random.default_rng(0).normal(3, 2, (6, 4, 5)).astype(np.float32)
digest = hashlib.sha256()
for placed in (False, True):
    x = flow.tensor(data, requires_grad=True)
    layer = flow.nn.LayerNorm(5)
    if placed:
        where = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}
        x, layer = flow.tensor(data, requires_grad=True, **where), layer.to_global(**where)
    y = layer(x)
    y.square().sum().backward()
    graph = flow.nn.Graph()
    graph.layer, graph.build = layer, lambda x: graph.layer(x)
    with flow.no_grad():
        lazy = graph(x.detach())
    for tensor in (y, lazy, x.grad, layer.weight.grad):
        digest.update(tensor.numpy().tobytes())
    patched = getattr(flow.nn.modules.normalization, "_has_layer_norm_kernel", None)
    if patched is not None:
        assert patched(x) == bool(CpuBackend().supports("native_layer_norm"))
print("normalized", digest.hexdigest())
"""
ONEFLOW_FIRST = "import oneflow\n"


@pytest.fixture
def run(tmp_path: Path):
    def run_script(script: str, *, processes: int = 0, patches: str = "on") -> CompletedProcess:
        file = tmp_path / "script.py"
        file.write_text(script)
        env = {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)]),
            "ONEFLOW_ACCEL_DEVICE": "cpu",
            settings.PATCHES.name: patches,
        }
        if processes:
            return run_distributed([file], processes, timeout=60, env=env)
        return run_process([file], timeout=60, env=env)

    return run_script


def line_of(process: CompletedProcess, start: str) -> str:
    assert process.returncode == 0, process.stdout
    return next(line for line in process.stdout.splitlines() if line.startswith(start))


def test_ddp_ends_with_what_else_goes_wrong_with_the_touch(run) -> None:
    process = run(DDP.format(fake=LOST_DEVICE))
    assert process.returncode != 0
    assert "the device is lost" in process.stdout


def test_ddp_of_two_processes_trains_to_the_same_bits_without_the_touch(run) -> None:
    without_touch = run(DDP.format(fake=NO_TOUCH_KERNEL), processes=2)
    with_touch = run(DDP.format(fake=""), processes=2, patches="off")
    assert line_of(without_touch, "trained") == line_of(with_touch, "trained")


def test_layer_norm_asks_the_device_layer_about_local_and_global_tensors(run) -> None:
    line_of(run(PLAIN_LAYER_NORM), "normalized")


def test_a_graph_keeps_its_threads_where_stock_kernels_run(run) -> None:
    script = "import os\nos.environ['ONEFLOW_ACCEL_PLUGIN'] = 'off'\n" + GRAPH_THREADS
    assert line_of(run(script), "threads") == f"threads {os.cpu_count()}"


@pytest.mark.skipif(not plugin.state().loaded, reason="it is for the plug-in's kernels")
def test_all_patches_hold_where_oneflow_is_imported_first(run) -> None:
    script = ONEFLOW_FIRST + GRAPH_THREADS + DROPOUT + GRAPH_BLOCKS + LAYER_NORM
    process = run(script)
    assert line_of(process, "threads") == "threads 1"
    assert line_of(process, "dropout") == "dropout True True"
    assert line_of(process, "blocks") == "blocks Linear (1, 1) its own"
    assert "deprecated" not in process.stdout
    assert line_of(process, "normalized") == "normalized"
    assert "imported late" not in process.stdout
    script = ONEFLOW_FIRST + DDP.format(fake=NO_TOUCH_KERNEL)
    line_of(run(script), "trained")


def test_what_was_made_before_oneflow_accel_came_is_named_in_one_line(run) -> None:
    made = "import oneflow\nlayers = [oneflow.nn.Dropout(0.5) for _ in range(3)]\n"
    process = run(made + "x = oneflow.ones(2) + 1\n" + DROPOUT)
    assert line_of(process, "dropout") == "dropout True True"
    (late,) = [line for line in process.stdout.splitlines() if "oneflow_accel" in line]
    assert "(3 Dropout)" in late
    assert "Import it at the top of the program" in late
    if plugin.state().loaded:
        assert "operations that have run keep its own kernels" in late
    assert "imported late" not in run(made + DROPOUT, patches="off").stdout
