"""The plug-in's loader: what it says and does when it is there, switched off, missing or unfit."""

from __future__ import annotations

import _ctypes
import json
import os
import shutil

from oneflow_accel import machine, settings
from oneflow_accel.kernels import plugin

import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels.records import matmul

REPORT = """
import json, sys
import oneflow_accel
from oneflow_accel.kernels import plugin
state = plugin.state()
print("state", json.dumps([state.loaded, state.reason, state.num_threads, len(state.operators)]))
"""
THREADS_OF_A_PROCESS = """
import os, pathlib, sys
import oneflow_accel
from oneflow_accel.kernels import plugin
file = pathlib.Path(sys.argv[1]) / ("process" + os.environ["RANK"])
file.write_text(str(plugin.state().num_threads))
"""
# Imported with the plug-in off, so that a second load() finds what the test has set up.
NOT_LOADED_YET = """
import logging, os, pathlib, sys
logging.basicConfig(stream=sys.stdout)
os.environ["ONEFLOW_ACCEL_PLUGIN"] = "off"
from oneflow_accel.kernels import plugin
os.environ["ONEFLOW_ACCEL_PLUGIN"] = "on"
plugin.load.cache_clear()
"""
# Operators that the plug-in has kernels for, before and after it is loaded.
BEFORE_AND_AFTER = """
import numpy as np, oneflow as flow
x = flow.tensor(np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32))
weight = flow.tensor(np.random.default_rng(1).normal(size=(4, 3, 3, 3)).astype(np.float32))
def results():
    flow.manual_seed(0)
    y = x.clone().requires_grad_()
    z = flow.relu(flow._C.conv2d(y, weight, None, stride=[1, 1], padding=[0, 0], dilation=[1, 1],
                                 groups=1, channel_pos="channels_first"))
    (z.flatten(1) @ flow.ones(144, 5)).softmax(-1).square().sum().backward()
    return [y.grad.numpy(), z.numpy(), flow.cat([x, x]).numpy(), flow.ones(3).numpy(),
            (x + x.transpose(2, 3)).tanh().numpy(), flow.nn.Dropout(0.5)(x).numpy()]
before = results()
import oneflow_accel
from oneflow_accel.kernels import plugin
assert plugin.state().came_late
for _ in range(3):
    for was, is_now in zip(before[:-1], results()):
        np.testing.assert_allclose(is_now, was, rtol=1e-4, atol=1e-5)
print("same", flow.nn.functional.gelu(x).shape)
"""
# libgomp ends and makes threads where a team is smaller or larger than the one before. 40,000
# elements are work for two or three threads.
NEW_THREADS = """
import os
import oneflow_accel
import oneflow as flow
small, large = flow.ones(40000), flow.ones(4000000)
rows, square = flow.ones(9, 512), flow.ones(512, 512)
def threads(y):
    y.sum().item()
    return set(os.listdir("/proc/self/task"))
for _ in range(3):
    known = threads(flow.relu(large)) | threads(flow.matmul(square, square))
new = set()
for _ in range(10):
    for y in (flow.relu(small), flow.relu(large), flow.matmul(rows, square), flow.randn(99999)):
        new |= threads(y) - known
print("new threads", sorted(new))
"""
CONVOLUTION = """
import oneflow
layer = oneflow.nn.Conv2d(3, 4, 3)
print("shape", tuple(layer(oneflow.ones(2, 3, 8, 8)).shape))
"""


THREADS = "ONEFLOW_ACCEL_THREADS"


def state_in_a_process(**env: str) -> list:
    # The tests' own number of threads is not what is asked about.
    process = run_process(["-c", REPORT], env={THREADS: "", **env})
    assert process.returncode == 0, process.stdout
    line = next(line for line in process.stdout.splitlines() if line.startswith("state "))
    return json.loads(line.removeprefix("state "))


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler on this machine"
)
def test_it_is_loaded_where_there_is_a_compiler() -> None:
    """Without this every test that needs the plug-in would be skipped, and the suite pass."""
    state = plugin.state()
    assert state.loaded, state.reason
    assert state.reason is None
    assert {"conv2d", "normalization", "max_pool_2d", "relu", "add_n"} <= set(state.operators)
    assert state.onednn_version == "3.2.0"


def test_off_switch_leaves_stock_kernels_and_says_so_once() -> None:
    script = "import oneflow_accel\n" + CONVOLUTION + "from oneflow_accel.kernels import plugin\n"
    process = run_process(
        ["-c", f"{script}plugin.load()\n{REPORT}"], env={"ONEFLOW_ACCEL_PLUGIN": "off"}
    )
    assert process.returncode == 0, process.stdout
    assert process.stdout.count("CPU kernels run on stock OneFlow") == 1
    assert "shape (2, 4, 6, 6)" in process.stdout
    assert 'state [false, "switched off by ONEFLOW_ACCEL_PLUGIN=off", ' in process.stdout


@pytest.mark.parametrize(
    ("set_up", "reason"),
    [
        ("plugin._LIBRARY_FOLDER = pathlib.Path('nowhere')", "the plug-in is not built"),
        ("plugin._ONEDNN_PACKAGE = 'no-such-package'", "libdnnl.so.3 of the package"),
        (
            "plugin._LIBRARY_FOLDER = pathlib.Path(sys.argv[1])",
            "found only liboneflow_accel_cpu_avx2_oneflow_0.8.0.so",
        ),
        (
            "old = pathlib.Path(sys.argv[1], 'cpuinfo'); plugin._CPU_INFO = old\n"
            "old.write_text('processor : 0\\nflags : fpu sse4_2 avx f16c\\n')",
            "this CPU has no ABM and no AVX2 and no BMI1 and no BMI2 and no FMA and no MOVBE",
        ),
        ("plugin._LIBRARY_FOLDER = pathlib.Path(sys.argv[1], 'damaged')", "cannot be loaded"),
    ],
    ids=["not-built", "no-onednn", "built-for-another-oneflow", "cpu-without-avx2", "damaged"],
)
def test_unfit_plug_in_is_named_and_everything_runs_without_it(tmp_path, set_up, reason) -> None:
    (tmp_path / plugin.library_name("0.8.0", "cpu_avx2")).write_bytes(b"")
    (tmp_path / "damaged").mkdir()
    for level in plugin.LEVELS:
        name = plugin.library_name("0.9.0", f"cpu_{level.library}")
        (tmp_path / "damaged" / name).write_bytes(b"not a library")
    if ("ONEDNN" in set_up or "CPU" in set_up) and not plugin.state().loaded:
        pytest.skip("the plug-in is not built, which is found first")
    script = f"{NOT_LOADED_YET}\n{set_up}\nplugin.load()\n{CONVOLUTION}"
    process = run_process(["-c", script, tmp_path], env={settings.ISA.name: ""})
    assert process.returncode == 0, process.stdout
    assert reason in process.stdout
    assert "shape (2, 4, 6, 6)" in process.stdout


def test_library_of_other_sources_is_named(tmp_path) -> None:
    """As after `git pull` without make."""
    for level in plugin.LEVELS:
        shutil.copy(
            _ctypes.__file__, tmp_path / plugin.library_name("0.9.0", f"cpu_{level.library}")
        )
    set_up = "plugin._LIBRARY_FOLDER = pathlib.Path(sys.argv[1])"
    script = f"{NOT_LOADED_YET}\n{set_up}\nimport oneflow_accel\noneflow_accel.select_device()"
    process = run_process(["-c", script, tmp_path])
    assert process.returncode != 0
    assert (
        "is of other sources than the Python files beside it: run `make plugin`" in process.stdout
    )
    assert process.stdout.splitlines()[-1].startswith("oneflow_accel.errors.UserError: ")


def test_level_that_the_cpu_lacks_is_an_error(tmp_path) -> None:
    flags = " ".join(plugin.LEVELS[0].flags)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags} avx512f avx512bw\n")
    script = (
        f"{NOT_LOADED_YET}\nplugin._CPU_INFO = pathlib.Path(sys.argv[1], 'cpuinfo')\nplugin.load()"
    )
    process = run_process(["-c", script, tmp_path], env={"ONEFLOW_ACCEL_ISA": "avx512"})
    assert process.returncode != 0
    assert process.stdout.splitlines()[-1].endswith(
        "UserError: ONEFLOW_ACCEL_ISA='avx512', and this CPU has avx2"
    )


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about the plug-in's levels")
@pytest.mark.parametrize("level", [level.name for level in plugin.cpu_levels()[:-1][:1]])
def test_kernels_pass_their_records_at_the_lowest_level(level: str) -> None:
    """The best that the CPU has is what all other tests run with, and what it shares with one in
    between."""
    assert_records_hold(ONEFLOW_ACCEL_ISA=level)


def assert_records_hold(*names: str, **environment: str) -> None:
    worker = ["-m", "tests.oneflow_accel.kernels.records_worker", "check", *names]
    process = run_process(worker, timeout=300, env=environment)
    assert "all as in the records" in process.stdout, process.stdout[-5000:]


# To a filter of system calls (seccomp(2)): no leave to use AMX's tiles (arch_prctl(2)).
REFUSED = """
import ctypes, struct
steps = (0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)
steps += (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
refused = prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(program))
"""


@pytest.mark.skipif(not plugin.state().fast_bfloat16, reason="no AVX-512 BF16 here")
def test_level_is_the_one_in_use_where_the_system_refuses_tiles(tmp_path) -> None:
    """And not what /proc/cpuinfo has."""
    flags = " ".join(flag for level in plugin.LEVELS for flag in level.flags)
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    script = (
        f"{NOT_LOADED_YET}\n{REFUSED}\nplugin._CPU_INFO = pathlib.Path(sys.argv[1], 'cpuinfo')\n"
        "print('refused', refused)\n"
    )
    shown = "from oneflow_accel import report\nprint(report.collect()['plugin']['level'])"
    process = run_process(["-c", script + shown, tmp_path])
    if "refused -1" in process.stdout:
        pytest.skip("this system takes no filter of system calls")
    assert process.stdout.splitlines()[-1] == "avx512_bf16", process.stdout
    process = run_process(
        ["-c", f"{script}plugin.load()", tmp_path], env={settings.ISA.name: "amx"}
    )
    assert "='amx', and this process gets avx512_bf16 only: the system refuses" in process.stdout


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about the plug-in's products")
@pytest.mark.skipif(plugin.mkl_library() is None, reason="the package mkl is not installed")
def test_products_through_mkl_pass_their_records() -> None:
    names = [record.name for record in matmul.RECORDS]
    assert_records_hold(*names, **{settings.BLAS.name: "mkl", THREADS: "2"})


PRODUCTS = """
import oneflow_accel
from oneflow_accel.kernels import plugin
print("products by", plugin.load().blas)
"""


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about the plug-in's products")
@pytest.mark.parametrize(
    ("vendor", "package", "choice", "said"),
    [
        ("AuthenticAMD", "mkl", None, "products by onednn"),
        ("AuthenticAMD", "no-such-package", "mkl", "pip install 'oneflow-accel[mkl]'"),
        # A library that is none of MKL's.
        ("GenuineIntel", "onednn-cpu-gomp", None, "it has no MKL_Set_Threading_Layer; oneDNN"),
        ("GenuineIntel", "onednn-cpu-gomp", "mkl", "UserError: ONEFLOW_ACCEL_BLAS='mkl', and "),
    ],
)
def test_who_multiplies(tmp_path, vendor, package, choice, said) -> None:
    lines = (line for line in plugin._CPU_INFO.read_text().splitlines() if "vendor_id" not in line)
    (tmp_path / "cpuinfo").write_text("\n".join([f"vendor_id : {vendor}", *lines]))
    set_up = (
        "plugin._CPU_INFO = pathlib.Path(sys.argv[1], 'cpuinfo')\n"
        f"plugin._MKL_PACKAGE = {package!r}\n"
        f"if {package!r} == 'onednn-cpu-gomp': plugin._MKL_LIBRARY = plugin._ONEDNN_LIBRARY\n"
    )
    env = {} if choice is None else {settings.BLAS.name: choice}
    script = f"{NOT_LOADED_YET}\n{set_up}{PRODUCTS}oneflow_accel.select_device()"
    assert said in run_process(["-c", script, tmp_path], env=env).stdout


def test_threads_come_from_the_variable() -> None:
    assert state_in_a_process(ONEFLOW_ACCEL_THREADS="3")[2] == 3


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about the plug-in's threads")
def test_threads_stay_whatever_the_size_of_the_work() -> None:
    process = run_process(["-c", NEW_THREADS], env={THREADS: "4"})
    assert "new threads []" in process.stdout, process.stdout


def test_processes_of_a_node_share_its_cores(tmp_path) -> None:
    """oneflow.distributed.launch sets OMP_NUM_THREADS=1; that does not bind the plug-in."""
    # A file for each process: what they print may be mixed.
    script = tmp_path / "threads.py"
    script.write_text(THREADS_OF_A_PROCESS)
    process = run_distributed([script, tmp_path], 2, timeout=60, env={THREADS: ""})
    expected = max(1, machine.cores() // 2)
    threads = [int((tmp_path / f"process{rank}").read_text()) for rank in range(2)]
    assert threads == [expected, expected], process.stdout


# libgomp prints what it has read, as it is loaded.
WAITS = """
import os
import oneflow_accel
print("left", [name for name in os.environ if name in ("GOMP_SPINCOUNT", "ONEDNN_MAX_CPU_ISA")])
"""


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about the plug-in's threads")
@pytest.mark.parametrize(
    ("env", "spins", "left"),
    [
        ({}, "1000", []),
        ({"GOMP_SPINCOUNT": "77"}, "77", ["GOMP_SPINCOUNT"]),
        ({"OMP_WAIT_POLICY": "passive"}, "0", []),
    ],
)
def test_threads_wait_briefly(env: dict[str, str], spins: str, left: list[str]) -> None:
    """Unless the user says otherwise; programs that are started from here hear nothing of it."""
    own = "import os; os.environ.pop('OMP_WAIT_POLICY')\n" * ("OMP_WAIT_POLICY" not in env)
    env = {"OMP_DISPLAY_ENV": "verbose", **env}
    process = run_process(["-c", own + WAITS], env=env)
    assert f"GOMP_SPINCOUNT = '{spins}'" in process.stdout, process.stdout
    assert f"left {left}" in process.stdout


@pytest.mark.skipif(not plugin.state().loaded, reason="it is about loading the plug-in")
def test_operators_that_ran_before_it_was_loaded_run_on() -> None:
    """OneFlow keeps pointers to the entries of their kernels, which new kernels must not move."""
    process = run_process(["-c", BEFORE_AND_AFTER])
    assert process.returncode == 0, process.stdout
    assert "same" in process.stdout
    assert "operations that have run keep its own kernels" in process.stdout
