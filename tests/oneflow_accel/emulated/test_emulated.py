"""The emulated device: a device to a program, the CPU to the last bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from oneflow_accel.backends import available_backends, registry

import pytest

from scripts import golden_record
from tests.launch import REPOSITORY, run_process
from tests.oneflow_accel.emulated import worker
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin


def run(function: str, **environment: str) -> Any:
    """What a function of the worker has found, in a process of its own."""
    done = run_process([Path(worker.__file__), function], env=environment)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.partition("found ")[2])


def test_it_is_there_and_never_chosen_by_itself() -> None:
    assert available_backends()["emulated"] is None
    assert "emulated" not in registry.PROBE_ORDER


def test_operators_give_the_cpus_bits() -> None:
    equal = run("operators")
    assert set(equal) == set(worker.CASES)
    assert [name for name, is_equal in equal.items() if not is_equal] == []


def test_copies_kernels_and_memory_are_counted() -> None:
    found = run("counted", ONEFLOW_ACCEL_EMULATED_DEVICES="2")
    assert found["sum"] == 2 * 4 * worker.MIB
    made = found["made"]
    assert (made["copies_to_host"], made["copies_to_device"]) == (1, 1)
    assert made["launches"] >= 2
    # Of two tensors of 16 MiB, in blocks of OneFlow's allocator.
    assert 32 * worker.MIB <= found["peak"] <= 80 * worker.MIB
    assert found["used"] <= found["peak"]
    assert found["devices"] == 2
    assert found["name"].startswith("emulated on ")
    assert found["lacks"] == ["host_memory"]


def test_out_of_memory_is_an_error_and_the_program_goes_on() -> None:
    *said, last = run("out_of_memory", ONEFLOW_ACCEL_EMULATED_MEMORY="64MiB")
    assert len(said) == 2
    for text in said:
        assert text.startswith("out of memory: 256 MiB were asked for, and ")
        assert " of the 64 MiB of emulated:0 are left" in text
    assert last == "4.0"


def test_a_command_says_it_in_a_sentence(tmp_path: Path) -> None:
    command = ["resnet50_imagenet/main.py", "-a", "resnet18", "--dummy", "--max-steps", "1"]
    command += ["-b", "4", "--image-size", "64", "-j", "0", "--device", "emulated"]
    done = run_process(
        [*command, "--output-dir", tmp_path], env={"ONEFLOW_ACCEL_EMULATED_MEMORY": "40MiB"}
    )
    assert done.returncode == 2
    assert "main.py: error: out of memory: " in done.stdout
    assert "take a smaller -b" in done.stdout
    assert "Traceback" not in done.stdout


def test_old_copies_of_weights_are_dropped() -> None:
    assert run("kept_weights")


def test_a_host_that_reads_device_memory_is_told() -> None:
    done = run_process([Path(worker.__file__), "touch"])
    assert done.returncode == -signal.SIGSEGV
    assert "the host reads or writes memory of an emulated device" in done.stdout


QUICK = ("resnet-graph", "resnet-2-processes", "vit-monarch", "gpt2", "gpt2-graph-TP2-PP2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name not in QUICK and not os.environ.get("ALL"),
                reason="others show it too: ALL=1 runs it",
            ),
        )
        for name in golden_record.CASES
    ],
)
def test_trainers_give_the_cpus_bits(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, figures and checkpoints, and they go on from the CPU's."""
    work = tmp_path_factory.getbasetemp() / "golden"
    monkeypatch.setattr(golden_record, "WORK", work)
    if not work.exists():
        golden_record.write_data(work / "data")
    tree = golden_record.Tree(REPOSITORY)
    on_device = golden_record.Tree(REPOSITORY, "emulated")
    assert golden_record.compare(name, golden_record.CASES[name], tree, on_device) == []
