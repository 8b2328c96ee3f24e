"""A request that fails on one rank or on both, on two real processes."""

from __future__ import annotations

import json
from pathlib import Path

from launch import REPOSITORY, run_distributed
from pipeline_fakes import TEXT

HERE = Path(__file__).parent
FAILED = "the generation failed; the log says why"


# What the fake model makes of a prompt without a fault: its text goes by position.
GOOD = ("good", ["good" + TEXT[3:7]])


def run(prompts: list[str]) -> tuple[int, list[tuple[str, object]], str]:
    """Exit code, each prompt with its outcome, and all that was printed."""
    paths = {"PYTHONPATH": f"{REPOSITORY}:{HERE}"}
    done = run_distributed(
        [HERE / "faults_worker.py", json.dumps(prompts)], 2, timeout=90, env=paths
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return done.returncode, [(prompt, outcome) for prompt, outcome in lines], done.stdout


def test_a_fault_between_steps_ends_its_request_on_every_rank() -> None:
    """Whichever rank has it; the next request finds the ranks together."""
    expected: list[tuple[str, object]] = [GOOD]
    expected += [
        (f"{place} {ranks}{clock}", FAILED)
        for place in ("start", "select")
        for ranks in ("0", "1", "01")
        for clock in ("", " clock")
    ]
    expected += [
        ("encode 0", "a file is missing"),
        ("encode 1", "rank 1: a file is missing"),
        ("encode 01", "a file is missing"),
        ("text 0", FAILED),
        GOOD,
    ]
    code, outcomes, output = run([prompt for prompt, _ in expected])
    assert outcomes == expected, output
    assert code == 0, output
    assert "rank 1: MemoryError: select" in output


def test_a_fault_inside_a_step_ends_the_job() -> None:
    code, outcomes, output = run(["good", "step 1", "good"])
    assert code != 0, output
    assert outcomes == [GOOD], output
    assert "OutOfStepError: MemoryError: step" in output
