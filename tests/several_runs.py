"""Runs commands one after the other in the processes of one start: `several_runs.py JSON`, a list
of command lines, each a module, whose main(argv) is called, and words. A launcher starts it, or
nothing does.

In a word {rank} is the process's and {other} that of the other of two, so that each can have a
folder of its own, as on machines without a common disk. After the JSON, `on` lets the next line
follow a user's error, which all processes must have, and says how each line ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial

from oneflow_accel import command, distributed, launched, settings


def main(lines: list[list[str]], *, goes_on: bool) -> int:
    said: list[str] = []
    own, end = distributed.rank(), launched.end
    if goes_on:
        # In place of the end of the process, but where the watchdog ends it.
        launched.end = lambda text, code, **more: (
            end(text, code, **more) if more else said.append(text)
        )
    for number, (name, *words) in enumerate(lines):
        module = importlib.import_module(name)
        if name.startswith("libai_projects"):
            # It ends the process.
            importlib.import_module("libai_projects.tools.train_net")._leave = sys.exit
        argv = [w.replace("{rank}", str(own)).replace("{other}", str(1 - own)) for w in words]
        # What a Llama's line has switched off.
        os.environ.pop(settings.DISABLE.name, None)
        run = partial(module.main, argv)
        code = _ended(partial(command.run, name, run) if goes_on else run)
        if goes_on:
            record = {"line": number, "rank": own, "code": code, "said": "".join(said)}
            os.write(1, f"\nended: {json.dumps(record)}\n".encode())
            said.clear()
        elif code:
            return int(code)
        # The next may read what this one has written.
        distributed.barrier()
    return 0


def _ended(run: Callable[[], object]) -> object:
    try:
        return run()
    except SystemExit as end:
        return end.code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), goes_on=sys.argv[2:] == ["on"]))
