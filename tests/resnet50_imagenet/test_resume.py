"""A run that was stopped, or killed, and resumed equals one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from oneflow_accel.training.checkpoint import CheckpointManager

import numpy as np
import pytest

from tests.launch import REPOSITORY
from tests.resnet50_imagenet.conftest import MAIN, SMALL, losses

KILLS = 20
STEPS = 70


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, (), id="eager"),
        pytest.param(1, ("--graph",), id="graph"),
        pytest.param(2, (), id="2-processes"),
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


@pytest.mark.parametrize(
    ("first", "then"), [((), ("--graph",)), (("--graph",), ())], ids=["to-graph", "to-eager"]
)
def test_run_can_be_resumed_the_other_way(shapes, run_main, tmp_path, first, then):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_main(shapes, *SMALL, *first, "--max-steps", "8", "--output-dir", whole)
    run_main(shapes, *SMALL, *first, "--max-steps", "5", "--output-dir", parts)
    resume = ("--max-steps", "8", "--resume", "auto", "--output-dir", parts)
    run_main(shapes, *SMALL, *then, *resume, fresh=True)
    np.testing.assert_allclose(
        list(losses(parts).values()), list(losses(whole).values()), rtol=1e-5
    )


def test_learning_rate_schedule_is_resumed_under_graph(shapes, run_main, tmp_path):
    """Epoch 30 divides the rate by 10: the same from a graph that starts there as eagerly."""
    outs = []
    for name, options in (("eager", ()), ("graph", ("--graph",))):
        outs.append(tmp_path / name)
        args = ("--start-epoch", "30", "--max-steps", str(30 * 12 + 3), "--lr", "0.5")
        run_main(shapes, *SMALL, *args, *options, "--freeze-bn", "--output-dir", outs[-1])
    np.testing.assert_allclose(
        list(losses(outs[0]).values()), list(losses(outs[1]).values()), rtol=1e-4
    )


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(shapes, run_main, tmp_path):
    """SIGKILL 20 times: while starting, training, validating, writing a checkpoint per step."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = (*map(str, (shapes, *SMALL)), "--max-steps", str(STEPS))
    run_main(*args, "--output-dir", whole)
    args = (*args, "--save-freq", "1", "--resume", "auto", "--output-dir", str(killed))
    moments = random.Random(0)
    resumed_from = set()
    for _ in range(KILLS):
        kill_at_a_random_moment([sys.executable, str(MAIN), *args], killed, moments)
        latest = CheckpointManager(killed / "checkpoints").latest()
        resumed_from.add(latest.name if latest else None)
    assert len(resumed_from) > 5, resumed_from
    run_main(*args, fresh=True)
    assert losses(killed) == losses(whole)
    assert losses(killed, "val") == losses(whole, "val")


def kill_at_a_random_moment(command: list[str], output_dir: Path, moments: random.Random) -> None:
    """Start the command and kill it: during its start, or soon after its next step or two."""
    log = output_dir / "metrics.jsonl"
    steps = moments.randrange(3)
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
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
