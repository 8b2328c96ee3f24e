"""Prints what --help of each program prints, as JSON; argv: modules, and files of programs."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys


def help_of(program: str) -> str:
    name, *arguments = program.split()
    sys.argv = [name, *arguments, "--help"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        if name.endswith(".py"):
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    return output.getvalue()


if __name__ == "__main__":
    print(json.dumps({program: help_of(program) for program in sys.argv[1:]}))
