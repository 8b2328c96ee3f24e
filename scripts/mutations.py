"""Breaks the code in small ways and counts which breakages the tests find.

    python scripts/mutations.py draw --seed 33 FILE   draws breakages that are found, and keeps them
    python scripts/mutations.py replay FILE           how many of those are found today

A breakage is one of a sign, an off-by-one, a dropped branch, a swapped argument. Each is made in a
copy of the tree and tested by its package's tests, the nearest first, until one fails, at most 90 s
(--seconds). `replay` looks for the line where it stands today, and tells apart one whose line is
gone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tracked import ROOT, listed_files

PACKAGES = (
    *("oneflow_accel", "flow_train", "monarch_flow", "resnet50_imagenet", "vit_10b"),
    "libai_projects",
)
# How many of each are drawn.
PYTHON, CSRC = 32, 8
# Where the tests of a room have another name.
_ROOMS = {
    "oneflow_accel": {"csrc": "kernels_records"},
    "libai_projects": {
        "inference": "pipeline",
        "models": "magicprompt",
        "projects": "llama",
        **dict.fromkeys(("command", "engine", "tools"), "train"),
    },
}
_SIGNS = {"+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">"}


@dataclass(frozen=True)
class Breakage:
    """A line of a file, stripped, and what stands there in its place."""

    file: str
    line: int
    kind: str
    old: str
    new: str

    def broken(self, text: str) -> str | None:
        """The file's text with it, at the line of that text nearest to where it was; None if there
        is none."""
        lines = text.splitlines(keepends=True)
        places = [n for n, line in enumerate(lines) if line.strip() == self.old]
        if not places:
            return None
        place = min(places, key=lambda n: abs(n + 1 - self.line))
        lines[place] = lines[place].replace(self.old, self.new)
        return "".join(lines)


def of_python(file: str, text: str) -> Iterator[Breakage]:
    """All breakages of a Python file that lie in one line."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        number, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not number or (end != number and not isinstance(node, ast.If)):
            continue
        found = _change(node, lines[number - 1])
        if found is not None:
            kind, new = found
            yield Breakage(file, number, kind, lines[number - 1].strip(), new.strip())


def _change(node: ast.AST, line: str) -> tuple[str, str] | None:
    """The kind of breakage that a node allows, and its line then; columns count bytes."""

    def cut(begin: int, end: int, new: str) -> str:
        data = line.encode()
        return (data[:begin] + new.encode() + data[end:]).decode()

    def span(part: ast.expr) -> tuple[int, int]:
        return part.col_offset, part.end_col_offset or 0

    def text(part: ast.expr) -> str:
        begin, end = span(part)
        return line.encode()[begin:end].decode()

    if isinstance(node, ast.BinOp | ast.Compare):
        first = node.left
        last = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
        kind = type(node.op if isinstance(node, ast.BinOp) else node.ops[0])
        sign, begin, end = _OPERATORS.get(kind, ""), span(first)[1], span(last)[0]
        if sign and line.encode()[begin:end].decode().strip("() ") == sign:
            between = line.encode()[begin:end].decode().replace(sign, _SIGNS[sign], 1)
            return "sign", cut(begin, end, between)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
        return "off-by-one", cut(*span(node), str(node.value + 1))
    elif isinstance(node, ast.If) and node.test.end_lineno == node.lineno:
        return "dropped branch", cut(*span(node.test), "False")
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        one, two = node.args[:2]
        plain = not any(isinstance(each, ast.Starred) for each in (one, two))
        if plain and text(one) != text(two):
            return "swapped argument", cut(
                one.col_offset, span(two)[1], f"{text(two)}, {text(one)}"
            )
    return None


def of_cpp(file: str, text: str) -> Iterator[Breakage]:
    """Breakages of a C++ file: those that a pattern finds in a line of code."""
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.strip()
        if not code or code.startswith(("//", "#", "*", "template", "static_assert")):
            continue
        if match := re.search(r"[\w)\]] ([-+*<]|<=) (?=[\w(])", code):
            at, sign = match.start(1), match[1]
            yield Breakage(
                file, number, "sign", code, code[:at] + _SIGNS[sign] + code[match.end(1) :]
            )
        if match := re.search(r"\b([0-8])\b(?![.\w\"'])", code):
            new = f"{code[: match.start()]}{int(match[1]) + 1}{code[match.end() :]}"
            yield Breakage(file, number, "off-by-one", code, new)
        if match := re.match(r"if \((.+)\) (.*)", code):
            yield Breakage(
                file, number, "dropped branch", code, f"if (false && ({match[1]})) {match[2]}"
            )
        if match := re.search(r"(?<=[a-z]\()(\w+), (\w+)(?=[,)])", code):
            swapped = f"{code[: match.start()]}{match[2]}, {match[1]}{code[match.end() :]}"
            yield Breakage(file, number, "swapped argument", code, swapped)


class Tree:
    """A copy of the working tree, with the environment and the kernels of this one."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.root, self._seconds = folder, seconds
        for file in listed_files(ROOT):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
        shutil.copytree(ROOT / "oneflow_accel/_lib", folder / "oneflow_accel/_lib")
        (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
        # Some tests ask git for the files.
        for words in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *words], cwd=folder, check=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
        self._environment |= {"XDG_CACHE_HOME": str(folder / ".cache"), "CUDA_VISIBLE_DEVICES": ""}

    def finds(self, breakage: Breakage) -> str | None:
        """The test that fails by it, or that it does not compile; None where none does, and "gone"
        without its line."""
        path = self.root / breakage.file
        text = path.read_text() if path.exists() else ""
        broken = breakage.broken(text)
        if broken is None:
            return "gone"
        path.write_text(broken)
        try:
            is_cpp = breakage.file.startswith("oneflow_accel/csrc")
            if is_cpp and not self._built():
                return "does not compile"
            return self._failing(breakage.file)
        finally:
            path.write_text(text)

    def _built(self) -> bool:
        words = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        environment = {**self._environment, "ONEFLOW_ACCEL_REQUIRE_PLUGIN": "1"}
        return not subprocess.run(
            words, cwd=self.root, env=environment, capture_output=True
        ).returncode

    def _failing(self, file: str) -> str | None:
        rooms = tests_of(file, self.root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *rooms]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if process.returncode in (0, 5):
            return None
        return failed[1] if failed else f"pytest ends with {process.returncode}"


def tests_of(file: str, root: Path) -> list[str]:
    """The test files of a file's package, those first that share most words with its path."""
    package, *rooms = Path(file).with_suffix("").parts
    names, whole = _ROOMS.get(package, {}), root / "tests" / package
    words = {word for room in rooms for word in names.get(room, room).split("_")}

    def strange(test: Path) -> int:
        its = re.split("[_/]", str(test.relative_to(whole).with_suffix("")))
        return sum(not any(each.startswith(word) for each in its) for word in words)

    return [str(test) for test in sorted(sorted(whole.rglob("test_*.py")), key=strange)]


def draw(file: Path, seed: int, seconds: int) -> None:
    """Draw breakages until so many are found as are wanted of each language."""
    chance = random.Random(seed)
    files = [
        each for each in listed_files(ROOT) if each.startswith(tuple(f"{p}/" for p in PACKAGES))
    ]
    python = [each for each in files if each.endswith(".py") and "/configs/" not in each]
    csrc = [each for each in files if each.startswith("oneflow_accel/csrc") and each[-4:] == ".cpp"]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder), seconds)
        kept, missed = [], 0
        for of_one, names, count in ((of_python, python, PYTHON), (of_cpp, csrc, CSRC)):
            found = 0
            while found < count:
                # By packages, then by files, so that large ones do not take all.
                package = chance.choice(sorted({name.split("/")[0] for name in names}))
                name = chance.choice([each for each in names if each.startswith(f"{package}/")])
                all_of_it = list(of_one(name, (ROOT / name).read_text()))
                if not all_of_it:
                    continue
                breakage = chance.choice(all_of_it)
                by = tree.finds(breakage)
                say(breakage, by)
                if by == "does not compile":
                    continue
                if by is None:
                    missed += 1
                    continue
                found += 1
                kept.append(asdict(breakage))
                file.write_text(
                    json.dumps({"seed": seed, "missed": missed, "found": kept}, indent=1)
                )
    print(f"{len(kept)} found, {missed} not, in {file}")


def replay(file: Path, seconds: int) -> int:
    """Try those of a file again; the exit code is 1 where more than one is not found."""
    breakages = [Breakage(**each) for each in json.loads(file.read_text())["found"]]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Tree(Path(folder), seconds)
        for breakage in breakages:
            results.append(tree.finds(breakage))
            say(breakage, results[-1])
    gone, lost = results.count("gone"), results.count(None)
    print(f"{len(results) - gone - lost} found, {lost} not, of {gone} the line is gone")
    return int(lost > 1)


def say(breakage: Breakage, by: str | None) -> None:
    where = f"{breakage.file}:{breakage.line} {breakage.kind}"
    print(f"{where}: {breakage.old}  ->  {breakage.new}\n    {by or 'NOT FOUND'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    first, second = commands.add_parser("draw"), commands.add_parser("replay")
    first.add_argument("--seed", type=int, default=33, help="(default: %(default)s)")
    for each in (first, second):
        each.add_argument("--seconds", type=int, default=90, help="of tests (default: %(default)s)")
        each.add_argument("file", type=Path, help="where the breakages are kept, JSON")
    options = parser.parse_args()
    if options.what == "replay":
        return replay(options.file, options.seconds)
    draw(options.file, options.seed, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
