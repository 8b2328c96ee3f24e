"""A ViT that is cut over processes trains as one that is whole, is resumed on any number of
processes, and survives what happens to processes and disks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import oneflow_accel

import numpy as np
import pytest

from tests.launch import REPOSITORY, child_environment, free_port, run_distributed, run_process
from tests.machines import train_until_one_is_killed, two_machines
from tests.modes import ALL, some
from tests.vit_10b.conftest import SCRIPT, SMALL, largest_gap, run_vit, values, weights
from vit_10b.options import parse_options, shape_of
from vit_10b.plan import Plan

# 13 million parameters: 0.2 GB, and the process half as much again.
WIDER = ("--embed_dim", "512", "--num_blocks", "4", "--ckpt_step_interval", "1", "--max_steps", "3")
STEPS = ("--max_steps", "10")
DROPOUT = ("--pos_dropout", "0.1", "--att_dropout", "0.2", "--mlp_dropout", "0.3")
# The 4-process run that all "resumed" ones go on from is at step 6.
GO_ON = ("--resume", "auto", "--reshard")
MODES: dict[int, dict[str, tuple[str, ...]]] = {
    4: {
        "full": (),
        "groups": ("--shard_group", "2"),
        "flat": ("--flatten_parameters",),
        "begun": ("--max_steps", "6"),
    },
    3: {"resumed": GO_ON},
    2: {
        "full": (),
        "no-recomputation": ("--no_grad_ckpt",),
        "weights-kept": ("--no_reshard_after_forward",),
        "all-kept": ("--no_reshard_after_forward", "--no_grad_ckpt"),
        "flat": ("--flatten_parameters", "--shard_multiple", "128"),
        "ahead": ("--prefetch",),
        "ahead-no-recomputation": ("--prefetch", "--no_grad_ckpt"),
        "replicated": ("--run_without_fsdp",),
        "resumed": GO_ON,
        "dropout": DROPOUT,
        "dropout-kept": (*DROPOUT, "--no_grad_ckpt", "--no_reshard_after_forward"),
    },
    1: {
        "whole": ("--run_without_fsdp",),
        "full": (),
        "resumed": GO_ON,
        "resumed-whole": ("--resume", "auto", "--run_without_fsdp"),
    },
}
# What always runs has each option once.
KEPT = {
    4: ("groups", "begun"),
    3: ("resumed",),
    2: ("full", "weights-kept", "flat", "ahead-no-recomputation", "dropout", "dropout-kept"),
    1: ("whole", "full", "resumed"),
}
MODES = {processes: some(modes, *KEPT[processes]) for processes, modes in MODES.items()}
COMPARED = [
    f"{processes}/{name}"
    for processes, modes in MODES.items()
    for name in modes
    if not name.startswith("dropout") and name not in ("whole", "begun")
]
# With ALL=1 those that the README speaks of.
KILLS, KILLED = (20, 4) if ALL else (2, 2)
# A fixture starts all modes; 20 kills take minutes.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("way", [("--run_without_fsdp",), ()], ids=["whole", "cut"])
def test_the_plan_is_what_a_run_takes(shapes: Path, tmp_path: Path, way: tuple[str, ...]) -> None:
    """With the checkpoints that it writes."""
    argv = [*SMALL, *WIDER, *way, "--data_dir", str(shapes), "--ckpt_dir", str(tmp_path)]
    run_vit([argv])
    options = parse_options(argv)
    planned = Plan.of(options, shape_of(options), 1).bytes / 1e9
    # Of a card there is no process beside the tensors, which are few here.
    rel = 0.15 if oneflow_accel.current_backend().supports("host_memory") else 0.3
    assert values(tmp_path, "peak_memory_gb")[-1] == pytest.approx(planned, rel=rel)


@pytest.fixture(scope="module")
def runs(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each mode in the folder PROCESSES/MODE; one start for each number of processes."""
    folder = tmp_path_factory.mktemp("vit")
    for processes, modes in MODES.items():
        lines = []
        for name, more in modes.items():
            out = folder / f"{processes}/{name}"
            if "--resume" in more:
                shutil.copytree(folder / "4/begun", out)
            line = (*SMALL, *STEPS, *more, "--data_dir", shapes, "--ckpt_dir", out)
            lines.append(line)
        run_vit(lines, processes)
    return folder


@pytest.mark.parametrize("mode", COMPARED)
def test_every_mode_trains_as_the_whole_model(runs: Path, mode: str) -> None:
    """Those that are resumed on another number of processes too."""
    whole = runs / "1/whole"
    assert min(values(whole, "grad_norm")) > 0.5, "the norm was never clipped"
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(values(runs / mode, name), values(whole, name), rtol=1e-6)
    np.testing.assert_allclose(
        values(runs / mode, "loss", "val"), values(whole, "loss", "val"), rtol=1e-6
    )
    assert largest_gap(weights(runs / mode), weights(whole)) < 1e-5


def test_dropout_draws_the_same_masks_again(runs: Path) -> None:
    again, kept = (values(runs / "2" / name, "loss") for name in ("dropout", "dropout-kept"))
    np.testing.assert_allclose(again, kept, rtol=1e-6)


def test_a_profile_of_two_processes_is_no_run(shapes: Path, tmp_path: Path) -> None:
    line = (*SMALL, "--data_dir", shapes, "--ckpt_dir", tmp_path / "out", "--profile", "1")
    output = run_vit([line], 2).stdout
    assert output.count("a step takes") == 1
    assert "eager_ccl_reduce_scatter" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["profile.json"]


def test_another_number_of_processes_must_be_allowed(runs: Path, shapes: Path) -> None:
    line = (*SMALL, "--data_dir", shapes, "--ckpt_dir", runs / "4/begun", "--resume", "auto")
    refused = run_vit([line], ok=False).stdout
    assert "was written by 4 processes and this job cuts the model over 1" in refused
    assert "--reshard" in refused
    assert "Traceback" not in refused


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(
    shapes: Path, tmp_path: Path
) -> None:
    """SIGKILL of one of several that train, evaluate or write a checkpoint a step."""
    args = [*map(str, (*SMALL, "--data_dir", shapes, "--ckpt_step_interval", 1))]
    args += ["--test_epoch_interval", "1", "--num_epochs", "3"]
    run_vit([(*args, "--ckpt_dir", tmp_path / "whole")], KILLED)
    killed, moments = tmp_path / "killed", random.Random(1)
    args += ["--resume", "auto", "--ckpt_dir", str(killed)]
    began_at = set()
    for _ in range(KILLS):
        began_at.add(_kill_one(args, killed, moments))
    assert len(began_at) > KILLS // 3, began_at
    result = run_distributed([SCRIPT, *args], KILLED)
    assert result.returncode == 0, result.stdout
    assert values(killed, "loss") == values(tmp_path / "whole", "loss")
    assert values(killed, "loss", "val") == values(tmp_path / "whole", "loss", "val")


def _kill_one(args: list[str], folder: Path, moments: random.Random) -> int:
    """Start the processes and kill one soon after a step; how many steps had been done before."""
    log = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "oneflow_accel.launch", "--nproc_per_node", str(KILLED)]
    command += ["--master_port", str(free_port()), str(SCRIPT), *args]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 90
        before, steps = None, moments.randrange(1, 3)
        while before is None or _lines(log) < before + steps:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "no step within 90 s"
            time.sleep(0.005)
            before = _lines(log) if before is None else min(before, _lines(log))
        time.sleep(moments.uniform(0, 0.1))
        ranks = subprocess.run(
            ["pgrep", "-f", "-P", str(process.pid), str(SCRIPT)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(moments.choice(ranks)), signal.SIGKILL)
        process.wait(30)
        return before
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# The second process may not write files larger than 10 kB from its second checkpoint on.
FULL_DISK = """
import resource, signal, sys
from vit_10b import run_vit_training
from flow_train.checkpoint import folders
from oneflow_accel import command, distributed
write, calls = folders._write_pieces, []
def limited(*args):
    calls.append(1)
    if distributed.rank() == 1 and len(calls) == 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    return write(*args)
folders._write_pieces = limited
sys.exit(run_vit_training.main(sys.argv[1:]))
"""


def test_a_full_disk_of_one_process_ends_all_and_spoils_nothing(
    shapes: Path, tmp_path: Path
) -> None:
    script, out = tmp_path / "full.py", tmp_path / "out"
    script.write_text(FULL_DISK)
    args = [*map(str, (*SMALL, "--data_dir", shapes, "--ckpt_dir", out, "--ckpt_step_interval", 2))]
    began = time.monotonic()
    result = run_distributed([script, *args], 2, timeout=60)
    assert time.monotonic() - began < 45
    assert result.returncode != 0
    assert "error: rank 1: the checkpoint could not be written on " in result.stdout
    assert "shard-00001-of-00002.safetensors: File too large" in result.stdout
    assert "earlier checkpoints are intact" in result.stdout
    assert (
        "Traceback"
        not in result.stdout.partition("subprocess.CalledProcessError")[0].partition(
            "Killing subprocess"
        )[0]
    )
    assert sorted(path.name for path in (out / "checkpoints").glob("*step*")) == ["step-00000002"]
    run_vit([(*args, "--resume", "auto")], 2)
    assert len(values(out, "loss")) == 16


def test_mistakes_are_said_once_and_without_a_traceback(shapes: Path, tmp_path: Path) -> None:
    """On two processes; what a single one can see is in test_vit_options.py."""
    data = ("--data_dir", str(shapes), "--ckpt_dir", str(tmp_path / "none"))
    # What the plan says, and what is found after the start.
    cases = {
        "--batch_size 13 is not a multiple of the 2 processes": ("--batch_size", "13"),
        "--warmup_steps 99: the run has 16 steps": ("--warmup_steps", "99"),
    }
    for sentence, more in cases.items():
        command = ["-m", "oneflow_accel.launch", "--nproc_per_node", "2", "--master_port"]
        command += [str(free_port()), str(SCRIPT), *SMALL, *data, *more]
        result = run_process(command, cwd=REPOSITORY)
        assert result.returncode == 2, result.stdout
        assert result.stdout.count(sentence) == 1, result.stdout
        assert "Traceback" not in result.stdout


def test_two_machines_with_a_folder_each_are_killed_and_go_on(
    shapes: Path, runs: Path, tmp_path: Path
) -> None:
    """Each has its own process's shard only; both must have a checkpoint for it to count."""
    outs = [tmp_path / "0", tmp_path / "1"]
    options = [*map(str, (*SMALL, *STEPS, "--data_dir", shapes, "--ckpt_step_interval", 2))]

    def command(rank: int, address: str, port: int, *more: str) -> list[str | os.PathLike[str]]:
        launcher = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "1"]
        launcher += ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", address]
        launcher += ["--master_port", str(port), str(SCRIPT)]
        return [*launcher, *options, *more, "--ckpt_dir", outs[rank]]

    with two_machines("namespaces") as machines:
        ready = lambda: _lines(outs[0] / "metrics.jsonl") >= 5  # noqa: E731
        ended = train_until_one_is_killed(machines, command, tmp_path, outs, ready, cwd=tmp_path)
        assert ended.sentence in ended.output, ended.output
        names = [sorted(path.name for path in out.glob("checkpoints/step-*/*")) for out in outs]
        assert set(names[0]) == {"shard-00000-of-00002.safetensors", "state.json"}
        assert set(names[1]) == {"shard-00001-of-00002.safetensors", "state.json"}
        # The newest of one is lost, so that they have to agree on the one before.
        shutil.rmtree(sorted(outs[1].glob("checkpoints/step-*"))[-1])
        port = free_port()
        jobs = [
            machines.popen(
                rank,
                command(rank, machines.address, port, "--resume", "auto"),
                tmp_path / f"{rank}.log",
                env={},
                cwd=tmp_path,
            )
            for rank in (0, 1)
        ]
        codes = [job.wait(90) for job in jobs]
    assert codes == [0, 0], (tmp_path / "0.log").read_text()
    np.testing.assert_allclose(values(outs[0], "loss"), values(runs / "2/full", "loss"), rtol=1e-6)
