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
from flow_train.metrics.log import read_metrics
from tests.launch import child_environment, free_port, run_process
from tests.resnet50_imagenet.conftest import MAIN, SMALL, losses


def test_resumed_losses_equal_uninterrupted_ones(shapes, run_main, tmp_path):
    """Stopped in the middle of the second epoch; to the last bit. A recipe of SGD: test_recipes.py.

    Masks of dropout come from a stream that moves on at each checkpoint: both runs write one.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = (shapes, *SMALL, "-a", "mobilenet_v2", "--optimizer", "adamw", "--save-freq", "15")
    common += ("--scheduler", "linear", "--epochs", "3")
    run_main(*common, "--max-steps", "18", "--output-dir", whole)
    for steps in ("15", "18"):
        run_main(*common, "--max-steps", steps, "--resume", "auto", "--output-dir", parts)
    assert losses(parts) == losses(whole)
    assert losses(parts, "val") == losses(whole, "val")


def test_the_rate_is_that_of_the_epoch_a_run_starts_at(shapes, run_main, tmp_path):
    """Epoch 30 divides it by 10."""
    args = ("--start-epoch", "30", "--max-steps", str(30 * 12 + 2), "--lr", "0.5", "--freeze-bn")
    result = run_main(shapes, *SMALL, *args, "--output-dir", tmp_path)
    assert "done: 362 steps, no epoch was validated" in result.stdout
    rates = {
        line["step"]: line["values"]["lr"] for line in read_metrics(tmp_path / "metrics.jsonl")
    }
    assert rates == {361: pytest.approx(0.05), 362: pytest.approx(0.05)}


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(shapes, run_main, tmp_path):
    """SIGKILL while training, validating or writing a checkpoint per step."""
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    args = (*map(str, (shapes, *SMALL)), "--max-steps", "26")
    run_main(*args, "--output-dir", whole)
    args = (*args, "--save-freq", "1", "--resume", "auto", "--output-dir", str(killed))
    resumed_from = set()
    for steps in (2, 12):
        # After the first step of a start, its checkpoint may not be whole yet.
        process, _ = signalled([str(MAIN), *args], killed, signal.SIGKILL, steps, moments)
        assert process.returncode == -signal.SIGKILL
        resumed_from.add(agreed_checkpoint("auto", killed).state["step"])
    assert len(resumed_from) == 2
    run_main(*args)
    assert losses(killed) == losses(whole)
    assert losses(killed, "val") == losses(whole, "val")


def test_a_run_killed_after_its_last_checkpoint_comes_to_its_end(shapes, run_main, tmp_path):
    """As a restart loop has it: the same command again, and again, and at last exit code 0."""
    args = (shapes, *SMALL, "--epochs", "1", "--output-dir", tmp_path, "--resume", "auto")
    best = re.search(r"done: 12 steps, best Acc@1 \d+\.\d+", run_main(*args).stdout).group()
    log = tmp_path / "metrics.jsonl"
    *trained, validated = log.read_text().splitlines(keepends=True)
    log.write_text("".join(trained))
    for _ in range(2):
        output = run_main(*args).stdout
        assert "nothing left to train: step 12 is done and the run ends at step 12" in output
        assert best in output
        loss = json.loads(validated)["values"]["loss"]
        assert losses(tmp_path, "val") == {12: pytest.approx(loss)}


def test_two_processes_that_are_told_to_stop_save_and_one_goes_on(shapes, run_main, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    args = (*map(str, (shapes, *SMALL)), "--max-steps", "20", "--freeze-bn", "--lr", "0.0003")
    launcher = ["-m", "oneflow.distributed.launch", "--nproc_per_node", "2", "--master_port"]
    launcher += [str(free_port()), str(MAIN), "--multiprocessing-distributed"]
    command = [*launcher, *args, "--output-dir", str(parts)]
    process, output = signalled(command, parts, signal.SIGINT, 3)
    # Oneflow's launcher has a code of its own.
    assert process.returncode == 1, output
    assert "told to stop (SIGINT)" in output
    assert "continue with --resume auto" in output
    assert "Traceback" not in output
    done = len(losses(parts))
    assert 0 < done < 20
    assert (parts / "checkpoints/latest").read_text().strip() == f"step-{done:08d}"
    run_main(*args, "--output-dir", whole)
    run_main(*args, "--output-dir", parts, "--resume", "auto")
    ours, theirs = losses(parts), losses(whole)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)


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


def signalled(
    command: list[str],
    output_dir: Path,
    signum: signal.Signals,
    steps: int,
    moments: random.Random | None = None,
) -> tuple[subprocess.Popen[str], str]:
    """`python COMMAND`, sent a signal after so many steps, and by `moments` a little later."""
    log = output_dir / "metrics.jsonl"
    count = lambda: log.read_bytes().count(b"\n") if log.exists() else 0  # noqa: E731
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    try:
        deadline, began_with = time.monotonic() + 120, count()
        while count() < began_with + steps:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.005)
            # The log is cut back to the checkpoint's step when the run has resumed.
            began_with = min(began_with, count())
        time.sleep(moments.uniform(0, 0.3) if moments else 0)
        assert process.poll() is None, "the run ended before it could be told"
        os.killpg(process.pid, signum)
        output, _ = process.communicate(timeout=60)
        return process, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
