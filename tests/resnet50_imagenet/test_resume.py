"""A run that was stopped, or killed, and resumed equals one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flow_train.checkpoint.folders import agreed_checkpoint
from tests.launch import child_environment, free_port, run_process
from tests.modes import ALL, only_all
from tests.resnet50_imagenet.conftest import MAIN, SMALL, losses

# With ALL=1 those that the README speaks of.
KILLS = 21 if ALL else 3
STEPS = 50


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, (), id="eager"),
        pytest.param(1, ("--graph",), id="graph"),
        pytest.param(2, (), id="2-processes", marks=only_all),
        pytest.param(
            1, ("--optimizer", "adamw", "--scheduler", "linear", "--epochs", "3"), id="adamw"
        ),
        # Masks come from a stream that moves on at each checkpoint: both runs write one there.
        pytest.param(1, ("-a", "mobilenet_v2", "--save-freq", "15"), id="dropout"),
    ],
)
def test_resumed_losses_equal_uninterrupted_ones(shapes, run_main, tmp_path, processes, options):
    """Stopped in the middle of the second epoch; to the last bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for steps, out in (("18", whole), ("15", parts)):
        args = (*SMALL, *options, "--max-steps", steps, "--output-dir", out)
        run_main(shapes, *args, processes=processes)
    resume = ("--max-steps", "18", "--resume", "auto", "--output-dir", parts)
    run_main(shapes, *SMALL, *options, *resume, processes=processes, fresh=True)
    assert losses(parts) == losses(whole)
    assert losses(parts, "val") == losses(whole, "val")


def test_learning_rate_schedule_is_resumed_under_graph(shapes, run_main, tmp_path):
    """Epoch 30 divides the rate by 10: the same from a graph that starts there as eagerly."""
    outs = []
    for name, options in (("eager", ()), ("graph", ("--graph",))):
        outs.append(tmp_path / name)
        args = ("--start-epoch", "30", "--max-steps", str(30 * 12 + 3), "--lr", "0.5")
        result = run_main(shapes, *SMALL, *args, *options, "--freeze-bn", "--output-dir", outs[-1])
        assert "done: 363 steps, no epoch was validated" in result.stdout
    np.testing.assert_allclose(
        list(losses(outs[0]).values()), list(losses(outs[1]).values()), rtol=1e-4
    )


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(shapes, run_main, tmp_path):
    """SIGKILL, many times: while starting, training, validating, writing a checkpoint per step."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = (*map(str, (shapes, *SMALL)), "--max-steps", str(STEPS))
    run_main(*args, "--output-dir", whole)
    args = (*args, "--save-freq", "1", "--resume", "auto", "--output-dir", str(killed))
    moments = random.Random(0)
    resumed_from = set()
    command = [sys.executable, str(MAIN), *args]
    for number in range(KILLS):
        kill_at_a_random_moment(command, killed, moments, steps=number % 3)
        found = agreed_checkpoint("auto", killed)
        resumed_from.add(found and found.state["step"])
    # One of three kills is after a second step, when the first one's checkpoint is whole.
    assert len(resumed_from) > KILLS // 3, resumed_from
    run_main(*args, fresh=True)
    assert losses(killed) == losses(whole)
    assert losses(killed, "val") == losses(whole, "val")


@pytest.mark.parametrize("logged", [True, False], ids=["validated", "not-validated"])
def test_a_run_killed_after_its_last_checkpoint_comes_to_its_end(
    shapes, run_main, tmp_path, logged
):
    """As a restart loop has it: the same command, again and again, and at last exit code 0."""
    out = tmp_path / "out"
    args = (shapes, *SMALL, "--epochs", "1", "--output-dir", out, "--resume", "auto")
    best = re.search(r"done: 12 steps, best Acc@1 \d+\.\d+", run_main(*args).stdout).group()
    log, curves = out / "metrics.jsonl", out / "curves.png"
    whole = log.read_text()
    assert not curves.exists()
    if not logged:
        lines = whole.splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["split"] == "train"))
    for _ in range(2):
        output = run_main(*args, env={"FLOW_TRAIN_CURVES": "on"}).stdout
        assert "nothing left to train: step 12 is done and the run ends at step 12" in output
        assert curves.exists()
        assert best in output
        assert losses(out, "val").keys() == {12}
        assert losses(out, "val")[12] == pytest.approx(
            json.loads(whole.splitlines()[-1])["values"]["loss"]
        )


@pytest.mark.parametrize(
    ("signum", "processes"),
    [
        pytest.param(signal.SIGINT, 1, marks=only_all),
        (signal.SIGTERM, 1),
        (signal.SIGINT, 2),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c-of-two"],
)
def test_a_run_that_is_told_to_stop_saves_and_goes_on(
    shapes, run_main, tmp_path, signum, processes
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = (*map(str, (shapes, *SMALL)), "--max-steps", "20")
    command = [sys.executable, str(MAIN)]
    if processes > 1:
        launcher = ["-m", "oneflow.distributed.launch", "--nproc_per_node", str(processes)]
        command[1:1] = [*launcher, "--master_port", str(free_port())]
        args = ("--multiprocessing-distributed", *args)
    process, output = stop_after_a_step(
        [*command, *args, "--output-dir", str(parts)], parts, signum
    )
    # Oneflow's launcher has a code of its own.
    assert process.returncode == (1 if processes > 1 else 128 + signum), output
    assert f"told to stop ({signum.name})" in output
    assert "continue with --resume auto" in output
    assert "Traceback" not in output
    done = len(losses(parts))
    assert 0 < done < 20
    assert (parts / "checkpoints/latest").read_text().strip() == f"step-{done:08d}"
    run_main(*args, "--output-dir", whole, processes=processes)
    run_main(*args, "--output-dir", parts, "--resume", "auto", processes=processes)
    assert losses(parts) == losses(whole)


def test_ctrl_c_before_the_first_step_says_that_nothing_is_there(shapes, tmp_path):
    out = tmp_path / "out"
    # A folder whose listing takes long enough, by a loader that is never fed.
    code = (
        "import os, signal, sys, time\n"
        "from resnet50_imagenet import main\n"
        # The signal may reach another thread first, and then ends no sleep.
        "def stop(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(600): time.sleep(0.1)\n"
        "main._datasets = stop\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    done = run_process(["-c", code, shapes, *SMALL, "--output-dir", out])
    assert done.returncode == 130, done.stdout
    assert f"main.py: interrupted; no checkpoint was written to {out}" in done.stdout
    assert "Traceback" not in done.stdout


def stop_after_a_step(
    command: list[str], output_dir: Path, signum: signal.Signals
) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while count_lines(output_dir / "metrics.jsonl") < 3:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.01)
        os.killpg(process.pid, signum)
        output, _ = process.communicate(timeout=60)
        return process, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_at_a_random_moment(
    command: list[str], output_dir: Path, moments: random.Random, *, steps: int
) -> None:
    """Start the command and kill it: during its start, or soon after this number of steps."""
    log = output_dir / "metrics.jsonl"
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )
    if steps == 0:
        time.sleep(moments.uniform(0.1, 2.5))
    else:
        started_with = None
        deadline = time.monotonic() + 60
        while started_with is None or count_lines(log) < started_with + steps:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "no step within 60 s"
            time.sleep(0.005)
            # The log is cut back to the checkpoint's step when the run has resumed.
            lines = count_lines(log)
            started_with = lines if started_with is None else min(started_with, lines)
        time.sleep(moments.uniform(0, 0.3))
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
