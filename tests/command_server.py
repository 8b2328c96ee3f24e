"""A process that calls a command's main(argv) as often as asked, as a start takes long.

How a process ends, and that it needs nothing of an earlier one, runs of tests/launch.py test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.launch import REPOSITORY, child_environment

EMPTY: Mapping[str, str] = MappingProxyType({})


class CommandServer:
    """Calls `module`.main(argv) in a process that starts with the first run, or anew.

    With `forks` each run has a process of its own, forked from one that has only imported the
    module: such a process has neither nn.Graph nor collectives.
    """

    def __init__(self, module: str, *, forks: bool = False, env: Mapping[str, str] = EMPTY) -> None:
        self.module, self._forks, self._env = module, forks, env
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        cwd: str | os.PathLike[str],
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """What `python -m MODULE ARGS...` gives, stderr as stdout; too late it is killed."""
        argv = list(map(os.fspath, args))
        process = self._process or self._start()
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            request = {"argv": argv, "cwd": os.fspath(cwd), "output": output.name}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                answered = bool(selector.select(timeout))
            answer = process.stdout.readline() if answered else ""
            text = output.read()
        if not answered:
            self.stop()
            raise subprocess.TimeoutExpired(argv, timeout, output=text)
        if not answer:
            # It ended in the middle of the run.
            code = process.wait()
            self.stop()
            return subprocess.CompletedProcess(argv, code or 1, text, "")
        return subprocess.CompletedProcess(argv, int(answer), text, "")

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.command_server", self.module, str(int(self._forks))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=child_environment(self._env),
            start_new_session=True,
        )
        return self._process

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve(module: str, forks: bool) -> None:
    """Answer each line of stdin with an exit status on what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main = importlib.import_module(module).main
    if forks:
        # What each run would import.
        importlib.import_module("tensorboard.summary")
    environment = dict(os.environ)
    for line in sys.stdin:
        request = json.loads(line)
        os.chdir(request["cwd"])
        sys.argv = [module, *request["argv"]]
        code = (_forked if forks else _run)(main, request["argv"], Path(request["output"]))
        # What has changed only: a thread of OneFlow's that reads a variable meanwhile ends all.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name in environment:
            if os.environ.get(name) != environment[name]:
                os.environ[name] = environment[name]
        print(code, file=answers, flush=True)


def _forked(main: Callable[[list[str]], int], argv: list[str], output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(_run(main, argv, output))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run(main: Callable[[list[str]], int], argv: list[str], output: Path) -> int:
    """The exit status; whatever is printed, by C++ too, goes to the file."""
    kept = os.dup(1), os.dup(2)
    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
    return code or 0


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] == "1")
