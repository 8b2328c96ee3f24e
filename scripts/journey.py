"""How long a journey is: the modules of this repository that it goes through, in the order of first
entry, with their functions.

    python scripts/journey.py step --main resnet
    python scripts/journey.py key mlp_cfg=monarch

`step` trains a tiny model eagerly, a case of golden_record.py, and counts the modules in which
Python code runs from the end of the second optimizer step to the end of the third: log line, next
batch, forward, backward, step. Not seen: C++, and other processes.

`key` builds a tiny Monarch ViT by monarch_flow.train with model.KEY=VALUE typed, or the value of
the experiment, and takes a step. Counted are modules with a function that has the value in a local
variable or one level below, in a list, a mapping or an object: what has the key's name and is not
None, the text KEY=VALUE, and mappings met before, and their parts, under any name; and the module
of the class that declares the key. What is made from the value, as a LinearConfig, does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import runpy
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import golden_record
from tracked import ROOT, listed_files

# Whose case has another name.
CASES = {"monarch": "vit-monarch", "vit_10b": "vit-10b"}
MAINS = ("resnet", "monarch", "vit_10b", "gpt2", "llama")


class _Watch:
    """Notes the code that runs after `begin` optimizer steps until the end of the next one, in
    frames that `takes` wants, and writes its modules and functions to `report` then."""

    def __init__(self, begin: int, report: str, takes: Callable[[FrameType], bool]) -> None:
        self.begin, self.report, self.takes = begin, report, takes
        self.files = {f"{ROOT}/{p}": p for p in listed_files(ROOT) if p[:8] != "scripts/"}
        self.found: dict[str, list[str]] = {}
        self.steps, self.step = 0, None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.steps == self.begin:
            self._note(frame)
            # The caller goes on, though it was entered earlier.
            if event == "return" and frame.f_back is not None:
                self._note(frame.f_back)
        if self.step is None and event == "call" and frame.f_code.co_name == "step":
            kinds = type(frame.f_locals.get("self")).__mro__
            if "Optimizer" in [kind.__name__ for kind in kinds]:
                self.step = frame
        elif frame is self.step and event == "return":
            self.steps, self.step = self.steps + 1, None
            if self.steps == self.begin + 1:
                packages = Counter(path.partition("/")[0] for path in self.found)
                lines = [f"{path}: {', '.join(names)}" for path, names in self.found.items()]
                parts = ", ".join(f"{count} of {name}" for name, count in packages.items())
                Path(self.report).write_text("\n".join([*lines, f"{len(lines)} modules: {parts}"]))

    def _note(self, frame: FrameType) -> None:
        path, name = self.files.get(frame.f_code.co_filename), frame.f_code.co_name
        if path is not None and self.takes(frame):
            functions = self.found.setdefault(path, [])
            # Not <lambda>, <listcomp> and their like.
            if name not in functions and name[0] != "<":
                functions.append(name)


class _Key:
    """Whether a frame has the value of a key."""

    def __init__(self, name: str) -> None:
        self.name, self.text = name, re.compile(rf"(\w+\.)*{name}(=.*)?", re.DOTALL)
        # Mappings met so far by id, kept so that no other object takes their place.
        self.values: dict[int, Any] = {}

    def __call__(self, frame: FrameType) -> bool:
        # A module's own names are texts and tables, not a value that passes.
        here = {} if frame.f_code.co_name == "<module>" else frame.f_locals
        return self._in(here) or any(self._is(value) or self._in(value) for value in here.values())

    def _is(self, value: Any) -> bool:
        return id(value) in self.values or bool(
            isinstance(value, str) and self.text.fullmatch(value)
        )

    def _in(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._is, value))
        # Asked for its __dict__, an object of oneflow may write to memory that is not its own.
        if type(value).__module__.partition(".")[0] == "oneflow":
            return False
        inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        found = inside.get(self.name)
        self._keep(found)
        return found is not None

    def _keep(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self.values[id(value)] = value
            for part in value.values():
                self._keep(part)


def _watched(report: str, key: str, *command: str) -> None:
    """Run a command of Python in this process, and write its journey."""
    watch = _Watch(0, report, _Key(key)) if key else _Watch(2, report, lambda frame: True)
    threading.setprofile(watch)
    sys.setprofile(watch)
    sys.argv = [*command]
    if command[0] != "-m":
        runpy.run_path(str(Path(command[0]).resolve()), run_name="__main__")
    else:
        del sys.argv[0]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    of = parser.add_subparsers(required=True)
    of.add_parser("step").add_argument("--main", choices=MAINS, required=True)
    of.add_parser("key").add_argument("key", metavar="KEY[=VALUE]")
    parser.set_defaults(key="", main="monarch")
    options = parser.parse_args()
    typed = [f"model.{options.key}"] if "=" in options.key else []
    case = golden_record.CASES[CASES.get(options.main, options.main)]
    golden_record.write_data(golden_record.WORK / "data")
    with tempfile.TemporaryDirectory() as out:
        watched = [__file__, "watched", f"{out}/report", options.key.partition("=")[0]]
        case = dataclasses.replace(case, command=[*watched, *case.command, *typed])
        golden_record.Tree(ROOT).run(case, Path(out) / "run", 4, resume=False)
        print(Path(out, "report").read_text())
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["watched"]:
        _watched(*sys.argv[2:])
    else:
        sys.exit(main())
