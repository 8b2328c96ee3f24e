"""The emulated device: a device to a program, the CPU to the last bit."""

from __future__ import annotations

import dataclasses
import json
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


@pytest.fixture
def work(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden record's folder, with its data, which all tests share."""
    folder = tmp_path_factory.getbasetemp() / "golden"
    monkeypatch.setattr(golden_record, "WORK", folder)
    if not folder.exists():
        golden_record.write_data(folder / "data")
    return folder


CARD = {"ONEFLOW_ACCEL_EMULATE": "mlu"}


def test_a_profile_takes_away_what_a_card_lacks() -> None:
    exp, double, triu, lacks, name = run("refused", **CARD)
    for text, operator in ((exp, "exp"), (double, "scalar_add"), (triu, "triu")):
        assert text.startswith("Cannot find the kernel")
        assert f"op_type_name: {operator}\n" in text
    assert lacks.startswith("as on mlu: adam_bias_correction_factor has no kernel")
    assert name.endswith("with what mlu has")


def test_ddp_needs_the_patch_of_stream_touch_there() -> None:
    """As on a card: its operator has no kernel."""
    assert run("ddp", **CARD) == run("ddp")
    stock = run_process(
        [Path(worker.__file__), "ddp"], env={**CARD, "ONEFLOW_ACCEL_PATCHES": "off"}
    )
    assert stock.returncode == 1
    assert "op_type_name: eager_nccl_touch" in stock.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is neither a profile nor a file of one"),
        ('{"device": "tpu", "sources": [], "dtypes": [], "operators": {}}', "'device' is none of"),
        (
            '{"device": "mlu", "sources": [], "dtypes": ["int8"],'
            ' "operators": {"int8": ["relux"]}}',
            "has no operator 'relux'",
        ),
    ],
)
def test_a_profile_that_is_none_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    command = ["-m", "oneflow_accel", "conformance", "--device", "emulated", "--only", "device"]
    done = run_process(command, env={"ONEFLOW_ACCEL_EMULATE": str(path)})
    assert done.returncode == 2, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_it_is_there_and_never_chosen_by_itself() -> None:
    assert available_backends()["emulated"] is None
    assert "emulated" not in registry.PROBE_ORDER


SYNCHRONOUS = {"ONEFLOW_ACCEL_EMULATED_STREAMS": "synchronous"}
# Work begins late, so that what does not wait for it finds other values.
LATE = {"ONEFLOW_ACCEL_EMULATED_FAULTS": "delay=0.002"}


@pytest.mark.parametrize("environment", [SYNCHRONOUS, LATE])
def test_operators_give_the_cpus_bits(environment: dict[str, str]) -> None:
    equal = run("operators", **environment)
    assert set(equal) == set(worker.CASES)
    assert [name for name, is_equal in equal.items() if not is_equal] == []


def test_training_gives_the_cpus_bits_each_time() -> None:
    assert run("trained") == [True] * 8


def test_streams_have_threads_of_their_own() -> None:
    assert run("threads") > 1
    assert run("threads", **SYNCHRONOUS) == 0


def test_a_slow_link() -> None:
    """8 MiB at 50 MB/s, and a copy that waits for the link only. The least that they may take."""
    faults = {"ONEFLOW_ACCEL_EMULATED_FAULTS": "bandwidth=5e7,latency=0.1"}
    large, small = run("seconds_of_copies", **faults)
    assert large > 0.1 + 8 * worker.MIB / 5e7
    assert 0.1 < small < large


def test_copies_kernels_and_memory_are_counted() -> None:
    found = run("counted", ONEFLOW_ACCEL_EMULATED_DEVICES="2")
    assert found["sum"] == 2 * 4 * worker.MIB
    made = found["made"]
    assert (made["copies_to_host"], made["copies_to_device"]) == (1, 1)
    # OneFlow's `copy`, which is the device's primitives.
    assert found["uncovered"] == 1
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


@pytest.mark.parametrize(
    ("faults", "code", "said"),
    [
        ("fail=conv_data_grad:30", 1, "conv_data_grad failed at its launch 30"),
        ("lost=1500", 1, "emulated:0 is lost"),
        ("lost=soon", 2, "ONEFLOW_ACCEL_EMULATED_FAULTS='lost=soon' is not a list of fail="),
    ],
)
def test_a_command_says_what_has_failed(faults: str, code: int, said: str, tmp_path: Path) -> None:
    command = ["resnet50_imagenet/main.py", "-a", "resnet18", "--dummy", "--max-steps", "4"]
    command += ["-b", "4", "--image-size", "32", "-j", "0", "--device", "emulated"]
    done = run_process(
        [*command, "--output-dir", tmp_path], env={"ONEFLOW_ACCEL_EMULATED_FAULTS": faults}
    )
    assert done.returncode == code, done.stdout
    assert "main.py: error: " in done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_sums_in_bfloat16_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    command = ["resnet50_imagenet/main.py", "-a", "resnet18", "--dummy", "--max-steps", "1"]
    command += ["-b", "4", "--image-size", "32", "-j", "0", "--device", "emulated"]
    command += ["--reduce-dtype", "bfloat16", "--output-dir", str(tmp_path)]
    done = run_process(command, env={"ONEFLOW_ACCEL_SHARED_MEMORY": "off"})
    assert done.returncode == 2
    assert "error: reduce_dtype bfloat16: emulated cannot do this" in done.stdout


@pytest.mark.usefixtures("work")
def test_nothing_is_lost_with_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that loses its device goes on from its last checkpoint to the end."""
    tree, case = golden_record.Tree(REPOSITORY, "emulated"), golden_record.CASES["vit-monarch"]
    out = tmp_path / "run"
    tree.run(case, out, 5, resume=False)
    with monkeypatch.context() as patch:
        patch.setenv("ONEFLOW_ACCEL_EMULATED_FAULTS", "lost=900")
        with pytest.raises(SystemExit) as ended:
            tree.run(case, out, 10, resume=True)
    assert " is lost: nothing runs on it any more; a run of training goes on" in str(ended.value)
    assert "Traceback" not in str(ended.value)
    tree.run(case, out, 10, resume=True)


def test_old_copies_of_weights_are_dropped() -> None:
    assert run("kept_weights")


def test_a_host_that_reads_device_memory_is_told() -> None:
    done = run_process([Path(worker.__file__), "touch"])
    assert done.returncode == -signal.SIGSEGV
    assert "the host reads or writes memory of an emulated device" in done.stdout


@pytest.mark.release
@pytest.mark.usefixtures("work")
def test_trainers_give_the_cpus_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, figures and checkpoints, and they go on from the CPU's."""
    name = "bf16-vit-graph-2-processes"
    monkeypatch.setenv("ONEFLOW_ACCEL_EMULATE_BFLOAT16", "1")
    tree = golden_record.Tree(REPOSITORY)
    on_device = golden_record.Tree(REPOSITORY, "emulated")
    assert golden_record.compare(name, golden_record.CASES[name], tree, on_device) == []


# Without what the card lacks: clipping, AdamW under nn.Graph, products over a split vocabulary.
@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "without", "more"),
    [
        ("vit-monarch", ("trainer.gradient_clip_val=1.0",), ()),
        ("gpt2", (), ("optim.params.clip_grad_max_norm=null",)),
    ],
)
def test_trainers_run_with_what_a_card_has(
    name: str,
    without: tuple[str, ...],
    more: tuple[str, ...],
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the CPU's bits under the same profile, and its numbers without one."""
    case = golden_record.CASES[name]
    words = [word for word in case.command if word not in without]
    # Whose masks are drawn otherwise where there is no fused operator.
    fixed = golden_record.WITHOUT_DROPOUT.get(name.partition("-")[0], [])
    case = dataclasses.replace(case, command=[*words, *more, *fixed])
    tree, on_card = golden_record.Tree(REPOSITORY), golden_record.Tree(REPOSITORY, "emulated")
    tree.run(case, work / "plain" / name, golden_record.MIDDLE, resume=False)
    monkeypatch.setenv("ONEFLOW_ACCEL_EMULATE", "mlu")
    assert golden_record.compare(name, case, tree, on_card) == []
    plain = golden_record.figures(work / "plain" / name)
    found = golden_record.figures(work / "runs" / name / "new")
    losses = [key for key in plain if "loss" in key]
    assert len(losses) >= golden_record.MIDDLE
    for key in losses:
        assert found[key] == pytest.approx(plain[key], rel=5e-4), key
