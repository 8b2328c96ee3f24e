"""How commands end: one sentence, said once, whichever launcher has started how many processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from oneflow_accel import command
from oneflow_accel.errors import UserError

import pytest

from tests.launch import REPOSITORY, free_port, run_process

STOCK, OURS = "oneflow.distributed.launch", "oneflow_accel.launch"
PROJECTS = REPOSITORY / "libai_projects"
MAIN = REPOSITORY / "resnet50_imagenet" / "main.py"
TRAIN_NET = [PROJECTS / "tools" / "train_net.py", "--config-file"]
TRAIN_NET += [PROJECTS / "projects" / "MagicPrompt" / "configs" / "gpt2_training.py"]
PIPELINE = PROJECTS / "projects" / "MagicPrompt" / "pipeline.py"

# One process finds a mistake of its own while the other waits for it.
ON_ONE = """
import sys
from oneflow_accel import command, distributed, watchdog
from oneflow_accel.errors import UserError

def act():
    with watchdog.guard():
        if distributed.rank() == 1:
            raise UserError("this disk is full")
        distributed.all_gather_json(0)

sys.exit(command.run("act.py", act))
"""

# What is typed, and what the one sentence holds.
TABLE = {
    "main-option": (
        [MAIN, "--epochs", "many"],
        "main.py: error: --epochs many: it must be a whole number",
    ),
    "train-key": (
        ["-m", "monarch_flow.train", "experiment=mnist/vit", "trainer.max_epoch=3"],
        "monarch_flow.train: error: ",
    ),
    "train_net-key": ([*TRAIN_NET, "train.outptu_dir=x"], "did you mean train.output_dir?"),
    "pipeline-key": (
        [PIPELINE, "--mode", "random", "model.cfg.num_layer=3"],
        "did you mean model.cfg.num_layers",
    ),
}


def launch(launcher: str, args: list[object], *, leads: bool) -> tuple[int, str]:
    """Exit code and output; `leads` its process group, as under a shell's job control."""
    for attempt in (1, 2):
        words = [sys.executable, "-m", launcher, "--nproc_per_node", "2"]
        words += ["--master_port", str(free_port()), *map(str, args)]
        process = subprocess.Popen(
            words if leads else ["bash", "-c", '"$@"; exit $?', "script", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        )
        try:
            # To the end of the last process that holds the pipe.
            output, _ = process.communicate(timeout=120)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            # About 1 of 100 starts of oneflow 0.9.0 hangs.
            assert attempt == 1, "hung twice"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    raise AssertionError("unreachable")


def check(ended: tuple[int, str], launcher: str, part: str) -> None:
    code, output = ended
    assert "Traceback" not in output, output
    said = [line for line in output.splitlines() if ": error" in line or "watchdog:" in line]
    assert len(said) == 1, output
    assert part in output
    # Oneflow's launcher has but one.
    assert code == (1 if launcher == STOCK else UserError.EXIT_CODE), output


@pytest.mark.parametrize("name", TABLE)
def test_an_error_of_all_processes_is_said_once(name: str) -> None:
    args, part = TABLE[name]
    # Both launchers, in both ways of being started.
    number = list(TABLE).index(name)
    launcher, leads = (STOCK, OURS)[number // 2], number % 2 == 0
    check(launch(launcher, args, leads=leads), launcher, part)


def test_an_error_of_one_process_is_said_by_it(tmp_path: Path) -> None:
    program = tmp_path / "on_one.py"
    program.write_text(ON_ONE)
    ended = launch(STOCK, [program], leads=False)
    check(ended, STOCK, "act.py: error (process 1): this disk is full")


# A process waits for one that never comes, neither heeds SIGTERM, and nothing watches them.
WAITS = """
import os, signal, sys, time
import oneflow_accel, oneflow as flow
signal.signal(signal.SIGTERM, lambda *_: None)
number = flow.ones(4)
flow.comm.all_reduce(number)
number.numpy()
open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while True:
        time.sleep(1)
flow.comm.all_reduce(number)
number.numpy()
"""


def test_nobody_outlives_a_killed_launcher(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    launchers, files = [], []
    for name in (STOCK, OURS):
        words = [sys.executable, "-m", name, "--nproc_per_node", "2", "--master_port"]
        words += [str(free_port()), str(tmp_path / "waits.py"), str(tmp_path / name)]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        launchers.append(subprocess.Popen(words, env=env, start_new_session=True))
        files += [tmp_path / f"{name}.{rank}" for rank in (0, 1)]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        for launcher in launchers:
            launcher.kill()
        wait_until(lambda: not any(runs(pid) for pid in pids), 20)
    finally:
        for launcher in launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def runs(pid: int) -> bool:
    """Nobody may have asked how it ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_exit_codes_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: BaseException) -> None:
        raise error

    assert command.run("name", lambda: None) == 0
    assert command.run("name", lambda: 3) == 3
    assert command.run("name", lambda: raises(UserError("a wrong word"))) == 2
    assert command.run("name", lambda: raises(KeyboardInterrupt("go on"))) == 130
    with pytest.raises(ValueError, match="a bug"):
        command.run("name", lambda: raises(ValueError("a bug")))
    assert capsys.readouterr().err == "name: error: a wrong word\nname: interrupted; go on\n"


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_lack_of_memory_is_a_sentence(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def raises() -> None:
        raise error("Error: out of memory: 9 GiB were asked for\nallocate failed")

    assert command.run("name", raises, "take -b 1") == UserError.EXIT_CODE
    said = capsys.readouterr().err
    assert said.startswith("name: error: out of memory: ")
    assert said.endswith("; take -b 1\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (TABLE["train-key"][0], {"HYDRA_FULL_ERROR": "1"}),
        (["-c", "import oneflow_accel"], {"ONEFLOW_ACCEL_TRACEBACK": "1"}),
        (["-c", "import oneflow_accel"], {}),
    ],
    ids=["hydra", "own", "none"],
)
def test_a_traceback_is_shown_on_request(words: list[object], variables: dict[str, str]) -> None:
    threads = "many" if words[0] == "-c" else "1"
    done = run_process(words, env={**variables, "ONEFLOW_ACCEL_THREADS": threads})
    assert done.returncode == UserError.EXIT_CODE
    shown = done.stdout.startswith("Traceback (most recent call last):\n")
    assert shown == bool(variables), done.stdout
    assert ": error: " in done.stdout.splitlines()[-1], done.stdout


@pytest.mark.parametrize(
    "how", ["print('x' * 100000)", "logging.getLogger().warning('x' * 100000)"]
)
def test_a_reader_that_goes_ends_a_command_without_a_word(how: str) -> None:
    """`main.py | head -3`"""
    code = (
        "import logging, sys\n"
        "from oneflow_accel import command\n"
        "command.log_to_stdout()\n"
        f"def act():\n    for _ in range(1000):\n        {how}\n"
        "sys.exit(command.run('name', act))\n"
    )
    script = '"$@" | head -c 10 >/dev/null; echo "code ${PIPESTATUS[0]}"'
    through_bash = "import os, sys; os.execvp('bash', sys.argv[1:])"
    words = ["bash", "-c", script, "script", sys.executable, "-c", code]
    done = run_process(["-c", through_bash, *words])
    assert "code 141" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
    assert "Exception ignored" not in done.stdout
    assert "Logging error" not in done.stdout
