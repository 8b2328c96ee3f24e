"""Imports modules, each in a process of its own: `import_each.py FIRST MODULES...`.

A process imports a package, and forks for each module and package in it. FIRST is the package
around all MODULES, or what a program has imported before each of them, separated by commas. Prints
a JSON object: what went wrong, by module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback

LANES = 2
# What takes long and is nobody's of ours.
HEAVY = ("numpy", "google.protobuf.text_format", "unidiff", "omegaconf", "matplotlib.pyplot")
HEAVY += ("pydantic", "tokenizers", "safetensors.numpy", "scipy.stats", "tensorboard.summary")


def import_in_forks(names: list[str], modules: list[str], lanes: int, log: int) -> None:
    """Import these modules, and after each package what is in it, and log what went wrong."""
    running: dict[int, tuple[str, int]] = {}
    waiting = list(names)
    while waiting or running:
        while waiting and len(running) < lanes:
            name = waiting.pop(0)
            child, output = start(name, modules, log)
            running[child] = (name, output)
        child, status = os.wait()
        name, output = running.pop(child)
        os.lseek(output, 0, os.SEEK_SET)
        with open(output, errors="replace") as file:
            said = file.read()
        if status or said:
            os.write(log, json.dumps([name, said or f"ended with {status}"]).encode() + b"\n")


def start(name: str, modules: list[str], log: int) -> tuple[int, int]:
    """The number of a process that imports a module, and the file of its stderr."""
    output = temporary_file()
    child = os.fork()
    if child:
        return child, output
    os.dup2(output, 2)
    code = 1
    try:
        importlib.import_module(name)
        import_in_forks(inside(name, modules), modules, 1, log)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the destructors of a library whose threads a fork does not have.
        sys.stderr.flush()
        os._exit(code)


def inside(package: str, modules: list[str]) -> list[str]:
    return [name for name in modules if name.rpartition(".")[0] == package]


def temporary_file() -> int:
    file, path = tempfile.mkstemp()
    os.unlink(path)
    return file


def main(first: str, modules: list[str]) -> None:
    for name in (*HEAVY, *first.split(",")):
        importlib.import_module(name)
    log = temporary_file()
    if first in modules:
        import_in_forks(inside(first, modules), modules, LANES, log)
    else:
        import_in_forks(modules, [], LANES, log)
    os.lseek(log, 0, os.SEEK_SET)
    with open(log) as file:
        print("wrong " + json.dumps(dict(json.loads(line) for line in file)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
