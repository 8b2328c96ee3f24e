"""When things go wrong: what is said, how it ends, and what is still there afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, free_port, run_process
from tests.libai_projects.train.conftest import (
    CONFIG,
    PROJECTS,
    SCRIPT,
    TINY,
    as_after_step_three,
    bash_command,
    losses,
    newest,
)

# The issue asks for 60 s.
ENDS_WITHIN = 60.0


def test_mistakes_are_said_once_and_without_a_traceback(environment, tmp_path):
    args = (f"train.output_dir={tmp_path / 'out'}", "model.cfg.num_attention_heads=3")
    result = run_process(
        bash_command(2, *TINY, *args, "train.dist.tensor_parallel_size=2"),
        env={**environment, "MAGICPROMPT_DATA": str(tmp_path / "nothing")},
        cwd=PROJECTS,
    )
    assert result.returncode == 2, result.stdout
    assert "Traceback" not in result.stdout, result.stdout
    for part in ("num_attention_heads=3", "tensor_parallel_size=2", str(tmp_path / "nothing")):
        assert part in result.stdout
    assert result.stdout.count("train_net.py: error:") == 1, result.stdout
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_programs_run_is_left_alone(train, tmp_path):
    """A run of its own it moves aside; test_training_runs.py has that."""
    other = tmp_path / "checkpoints" / "step-00000001" / "state.json"
    other.parent.mkdir(parents=True)
    other.write_text("main.py's")
    result = train(out=tmp_path, ok=False)
    assert result.returncode == 2, result.stdout
    assert "already holds a run (checkpoints/step-00000001)" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints"]


def test_weights_of_another_model_are_one_line(train, tmp_path):
    with tarfile.open(REPOSITORY / "tests/data/libai_checkpoints/eager.tar.gz") as archive:
        archive.extractall(tmp_path)
    weights = f"train.load_weight={tmp_path / 'model_0000001'}"
    result = train(weights, out=tmp_path / "out", ok=False)
    assert result.returncode == 2, result.stdout
    error = result.stdout[result.stdout.index("train_net.py: error:") :]
    assert error.count("\n") == 1, error
    assert "does not fit the model: 12 missing (such as " in error
    assert "mis-shaped (such as GPT_model.embeddings.token_embeddings.weight" in error


def test_full_disk_leaves_the_checkpoint_before_it_whole(train, whole_run, environment, tmp_path):
    """A limit on the size of files stands in for a full disk: both end a write half-way."""
    out = as_after_step_three(whole_run, tmp_path / "out")
    # The token embedding takes 128 kB; logs and config stay below 64 kB.
    limited = f'ulimit -f 64; exec {sys.executable} "$0" "$@"'
    script = [SCRIPT, "--config-file", CONFIG, *TINY, f"train.output_dir={out}", "--resume"]
    command = ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", "bash", "-c", limited]
    result = run_process([*command, *script], env=environment, cwd=PROJECTS)
    assert result.returncode == 2, result.stdout
    error = result.stdout[result.stdout.index("train_net.py: error:") :]
    assert "too large" in error.lower(), error
    assert "Traceback" not in error
    assert newest(out) == "step-00000003"
    train("--resume", out=out)
    assert newest(out) == "step-00000006"
    assert losses(out) == losses(whole_run)


def test_killed_rank_ends_the_others_and_is_named(environment, tmp_path):
    """By the stock launcher, so that it is not ours that ends them."""
    out = tmp_path / "out"
    longer = ("train.train_iter=100000", "train.checkpointer.period=5")
    options = ("train.evaluation.enabled=false", "train.dist.tensor_parallel_size=2")
    for attempt in (1, 2):
        launcher = ["-m", "oneflow.distributed.launch", "--nproc_per_node", "2"]
        launcher += ["--master_port", str(free_port()), SCRIPT, "--config-file", CONFIG]
        process = subprocess.Popen(
            [sys.executable, *launcher, *TINY, *longer, *options, f"train.output_dir={out}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=PROJECTS,
            env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        try:
            if not wait_for_checkpoint(out, process):
                # About 1 of 100 starts hangs.
                assert attempt == 1, "no checkpoint within two minutes, twice"
                continue
            victim = child_of_rank(process.pid, 1)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            output, _ = process.communicate(timeout=ENDS_WITHIN)
            assert time.monotonic() - killed < ENDS_WITHIN
            break
        finally:
            # Nothing of it may be left, whatever happened.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode != 0
    assert f"rank 1 (pid {victim}" in output, output
    assert newest(out)


FAKE_WANDB = """
import json, os

class Run:
    config = {}

    def log(self, values, step):
        print(json.dumps([step, values]), file=open(os.environ["WANDB_CALLS"], "a"), flush=True)

    def finish(self):
        self.log("finish", 0)

def init(**options):
    run = Run()
    run.log({name: options[name] for name in ("mode", "project", "dir")}, -1)
    return run
"""


def test_sigterm_writes_a_checkpoint_and_the_run_goes_on_bit_for_bit(train, environment, tmp_path):
    """With dropout, and with metrics that go to wandb as well."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    calls, out = tmp_path / "calls.jsonl", tmp_path / "out"
    # A schedule that does not depend on the length of the run.
    common = ("train.scheduler.gamma=0.95", "train.evaluation.enabled=false")
    common += ("train.checkpointer.period=1000000",)
    options = (*common, "train.train_iter=100000", "train.logger.wandb={project: gpt2}")
    options += (f"train.output_dir={out}",)
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--config-file", CONFIG, *TINY, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PROJECTS,
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
            "WANDB_CALLS": str(calls),
        },
    )
    try:
        deadline = time.monotonic() + 120
        while not calls.exists() or calls.read_text().count("\n") < 5:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=ENDS_WITHIN)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "told to stop (SIGTERM) at step" in output
    assert "Traceback" not in output
    done = max(losses(out))
    assert newest(out) == f"step-{done:08d}"
    told = [json.loads(line) for line in calls.read_text().splitlines()]
    assert told[0] == [-1, {"mode": "offline", "project": "gpt2", "dir": str(out)}]
    assert [step for step, _ in told[1:4]] == [0, 0, 1]
    assert told[2][1]["model/params_trainable"] == 101_888
    assert told[3][1]["train/loss"] == losses(out)[1]
    assert told[-1] == [0, "finish"]
    further = (*common, f"train.train_iter={done + 3}")
    train(*further, "--resume", out=out)
    train(*further, out=tmp_path / "whole")
    assert max(losses(out)) == done + 3
    assert losses(out) == losses(tmp_path / "whole")


def wait_for_checkpoint(out: Path, process: subprocess.Popen[str]) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        if (out / "checkpoints" / "latest").exists():
            return True
        time.sleep(0.1)
    return False


def child_of_rank(launcher: int, rank: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in children:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"no process of rank {rank} among {children}")


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
    ids=["exit", "signal"],
)
def test_launcher_passes_on_how_a_process_ended(environment, tmp_path, code, expected):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(60)\n"
    )
    launcher = ["tools/launch.py", "--nproc_per_node", "2", "--master_port", "auto", str(script)]
    started = time.monotonic()
    result = run_process(launcher, env=environment, cwd=PROJECTS)
    assert result.returncode == expected, result.stdout
    assert time.monotonic() - started < 30
    assert "Traceback" not in result.stdout
    assert ("rank 1 was ended by SIGKILL" in result.stdout) == (expected == 137)
