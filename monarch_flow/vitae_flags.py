"""Translates the options of ViTAE's own programs for those who type them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent / "docs" / "vitae_options.md"
# The model that their programs train without --model.
_DEFAULT_MODEL = "T2t_vit_14"
# --sparse-epoch is a share of their runs' length: 300 epochs and 10 of cool-down.
_EPOCHS = 310


@dataclass(frozen=True)
class _Option:
    """An option of theirs: the values it has in DOCUMENT, and what is said there of its place here;
    `overrides` of ours stand for it with those values."""

    example: list[str]
    here: str
    remarks: str
    overrides: list[str]

    def __str__(self) -> str:
        if self.here == "none":
            return f"nothing stands for it here{f' ({self.remarks})' if self.remarks else ''}"
        return f"here it is {self.here.replace('`', '')}"


@cache
def _options(program: str) -> dict[str, _Option]:
    """The options of ViTAE's `program`, "main.py" or "validate.py", from the tables in DOCUMENT;
    none where that is not installed."""
    other = {"main.py", "validate.py"} - {program}
    found: dict[str, _Option] = {}
    for line in DOCUMENT.read_text().splitlines() if DOCUMENT.is_file() else []:
        # A bar inside code is escaped.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or not cells[0].startswith(("`-", "`DIR`")):
            continue
        names, here, remarks = cells
        if any(name in names for name in other):
            continue
        codes = [code.split() for code in _code(names)]
        overrides = [text.replace("'", "") for text in _code(here) if "=" in text]
        for name, *values in codes:
            # A second name of an option takes the values of the first.
            example = values or (codes[0][1:] if here != "none" else [])
            example = ["DIR"] if name == "DIR" else example
            found.setdefault(name, _Option(example, here, remarks, overrides))
    return found


@dataclass
class Translation:
    """ViTAE's command line as our overrides and recipe; `remarks` say what has no counterpart."""

    overrides: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    experiment: str = ""

    def command(self, module: str) -> str:
        """The whole command, for a module such as "monarch_flow.train"."""
        processes = os.environ.get("WORLD_SIZE", "1")
        launch = f"oneflow.distributed.launch --nproc_per_node {processes} -m "
        launch = "" if processes == "1" else launch
        words = [f"experiment={self.experiment}"] if self.experiment else []
        return f"python -m {launch}{module} {shlex.join([*words, *self.overrides])}"


def translate(argv: Sequence[str], program: str, ours: Sequence[str] = ()) -> Translation | None:
    """A command line typed as for ViTAE's main.py (the fork's mymain.py) or validate.py.

    None where none of their options is in it, or the document is not installed. `ours` are flags of
    ours, which alone do not make a command line theirs.
    """
    known = _options(program) if program else {}
    result, typed = Translation(), _typed(argv, known)
    if not any(name.startswith("-") and name in known and name not in ours for name, _ in typed):
        return None
    values = dict(typed)
    has_experiment = any(text.startswith("experiment=") for text in argv)
    if "--model" not in values and not has_experiment:
        typed = [("--model", [_DEFAULT_MODEL]), *typed]
    for name, given in typed:
        option = known.get(name)
        if name == "":
            result.overrides += given
        elif name == "--model":
            experiment = _experiment(given[0]) if given else ""
            if has_experiment and experiment.startswith("imagenet/vitae/"):
                result.overrides.append(f"model/vitaemodel={experiment.rpartition('/')[2]}")
            elif not has_experiment:
                result.experiment = experiment
            if not experiment:
                listed = "python -m monarch_flow.models lists those that are here"
                result.remarks.append(f"--model {' '.join(given)}: {listed}")
        elif name == "--local_rank":
            # torch's launcher adds it; nobody has typed it.
            continue
        elif option is None:
            result.remarks.append(f"there is no flag {name}; --help lists the flags")
        elif not re.search(r"`[\w./]+=", option.here):
            result.remarks.append(f"{name}: {option}")
        else:
            result.overrides += _overrides(name, given, option, values)
    return result


def _typed(argv: Sequence[str], known: Mapping[str, _Option]) -> list[tuple[str, list[str]]]:
    """(option, its values) in their order; "" for overrides of ours, "DIR" for the folder."""
    found: list[tuple[str, list[str]]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            found.append(("", [word]) if "=" in word else ("DIR", [word]))
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        wanted = len(known[name].example) if name in known else 0
        while words and len(values) < wanted and _is_value(words[0]):
            values.append(words.pop(0))
        found.append((name, values))
    return found


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(re.fullmatch(r"-[\d.]+(e-?\d+)?", word))


def _overrides(
    name: str, given: list[str], option: _Option, values: Mapping[str, list[str]]
) -> list[str]:
    """The option's overrides, with the typed values in place of its own."""
    value = ",".join(given)
    if "" in given or (name == "--eval-metric" and value in ("top1", "acc1")):
        # The same as without the option.
        return []
    if name in ("-vb", "--validation-batch-size-multiplier"):
        size = next((v[0] for n, v in values.items() if n in ("-b", "--batch-size") and v), "64")
        if value.isdigit() and size.isdigit():
            return [f"datamodule.batch_size_eval={int(value) * int(size)}"]
    if name == "--sparse-epoch" and value.isdigit():
        return [f"train.sparse_to_dense.fraction={min(1.0, int(value) / _EPOCHS):.4g}"]
    if name == "--resume" and "--no-resume-opt" in values:
        return [f"train.init_from.path={value}"]
    if name == "--no-resume-opt":
        return []
    example = ",".join(option.example)
    if not given or not example:
        return option.overrides
    return [text.replace(example, value) for text in option.overrides]


def _experiment(model: str) -> str:
    """The recipe of a model by the name that their programs know it by; "" where there is none."""
    vitae = re.fullmatch(r"ViTAE_basic_(Tiny|6M|13M|Small|Base|Large|Huge)", model)
    if vitae:
        return f"imagenet/vitae/{vitae[1].lower()}"
    t2t = re.fullmatch(r"T2t_vit_(7|14|t_14)", model, re.IGNORECASE)
    return f"imagenet/t2tvit/t2tvit{t2t[1].lower().replace('_', '')}" if t2t else ""


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
