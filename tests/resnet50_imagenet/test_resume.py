"""A run that was stopped, or killed, and resumed equals one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

from oneflow_accel.training.checkpoint import CheckpointManager

import numpy as np
import pytest

from tests.launch import REPOSITORY
from tests.resnet50_imagenet.conftest import MAIN, SMALL, losses

KILLS = 20
STEPS = 24


@pytest.mark.parametrize(
    ("processes", "first", "then"),
    [
        pytest.param(1, (), (), id="eager"),
        pytest.param(1, ("--graph",), ("--graph",), id="graph"),
        pytest.param(2, (), (), id="2-processes"),
    ],
)
def test_resumed_losses_equal_uninterrupted_ones(
    shapes, run_main, tmp_path, processes, first, then
):
    """Stopped in the middle of the second epoch; to the last bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_main(
        shapes, *SMALL, *first, "--max-steps", "18", "--output-dir", whole, processes=processes
    )
    run_main(
        shapes, *SMALL, *first, "--max-steps", "15", "--output-dir", parts, processes=processes
    )
    resume = ("--max-steps", "18", "--resume", "auto", "--output-dir", parts)
    run_main(shapes, *SMALL, *then, *resume, processes=processes)
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
    run_main(shapes, *SMALL, *then, *resume)
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
    """SIGKILL 20 times, anywhere between start-up, training, validation and writing."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = (*map(str, (shapes, *SMALL)), "--max-steps", str(STEPS), "--save-freq", "1")
    run_main(*args, "--output-dir", whole)
    moments = random.Random(0)
    command = [sys.executable, str(MAIN), *args, "--resume", "auto", "--output-dir", str(killed)]
    kills = 0
    progress = set()
    while kills < KILLS:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        # Not before the interpreter is up; then anywhere within the next few steps.
        deadline = time.monotonic() + moments.uniform(0.8, 3.0)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        latest = CheckpointManager(killed / "checkpoints").latest()
        progress.add(latest.name if latest else None)
        if latest is not None and latest.name == f"step-{STEPS - 2:08d}":
            # Near the end: leave the last steps to the run that is to finish.
            break
    assert kills >= 3, "the run ended before it could be killed"
    assert len(progress) > 1, "no run got as far as a checkpoint"
    run_main(*args, "--resume", "auto", "--output-dir", killed)
    assert losses(killed) == losses(whole)
    assert losses(killed, "val") == losses(whole, "val")
