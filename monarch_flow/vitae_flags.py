"""Translates the options of ViTAE's own programs for those who type them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent / "docs" / "vitae_options.md"
# The model that their programs train without --model.
_DEFAULT_MODEL = "T2t_vit_14"
# --sparse-epoch is a share of their runs' length: 300 epochs and 10 of cool-down.
_EPOCHS = 310


def counterpart(flag: str, program: str) -> str | None:
    """What to say about an option of ViTAE's `program`, "main.py" or "validate.py", from the tables
    in DOCUMENT; None where it is not one, or the document is not installed."""
    row = _row(flag, program)
    if row is None:
        return None
    _, here, remarks = row
    if here == "none":
        return f"nothing stands for it here{f' ({remarks})' if remarks else ''}"
    return f"here it is {here.replace('`', '')}"


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
    result, typed = Translation(), _typed(argv, program)
    names = [name for name, _ in typed if name.startswith("-") and name not in ours]
    if not program or not any(_row(name, program) for name in names):
        return None
    values = dict(typed)
    has_experiment = any(text.startswith("experiment=") for text in argv)
    if "--model" not in values and not has_experiment:
        typed = [("--model", [_DEFAULT_MODEL]), *typed]
    for name, given in typed:
        row = _row(name, program)
        if name == "":
            result.overrides += given
        elif name == "--model":
            experiment = _experiment(given[0]) if given else ""
            if has_experiment and experiment.startswith("imagenet/vitae/"):
                result.overrides.append(f"model/vitaemodel={experiment.rpartition('/')[2]}")
            elif not has_experiment:
                result.experiment = experiment
            if not experiment:
                known = "python -m monarch_flow.models lists those that are here"
                result.remarks.append(f"--model {' '.join(given)}: {known}")
        elif name == "--local_rank":
            # torch's launcher adds it; nobody has typed it.
            continue
        elif row is None:
            result.remarks.append(f"there is no flag {name}; --help lists the flags")
        elif row[1] == "none" or not re.search(r"`[\w./]+=", row[1]):
            result.remarks.append(f"{name}: {counterpart(name, program)}")
        else:
            result.overrides += _overrides(name, given, row, values)
    return result


def _typed(argv: Sequence[str], program: str) -> list[tuple[str, list[str]]]:
    """(option, its values) in their order; "" for overrides of ours, "DIR" for the folder."""
    found: list[tuple[str, list[str]]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            found.append(("", [word]) if "=" in word else ("DIR", [word]))
            continue
        name, equals, value = word.partition("=")
        row = _row(name, program)
        values = [value] if equals else []
        while row and words and len(values) < len(_example(name, row)) and _is_value(words[0]):
            values.append(words.pop(0))
        found.append((name, values))
    return found


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(re.fullmatch(r"-[\d.]+(e-?\d+)?", word))


def _overrides(
    name: str, given: list[str], row: list[str], values: dict[str, list[str]]
) -> list[str]:
    """The row's overrides, with the typed values in place of its own."""
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
    example = ",".join(_example(name, row))
    texts = [text.replace("'", "") for text in _code(row[1]) if "=" in text]
    return [text.replace(example, value) if given and example else text for text in texts]


def _example(name: str, row: list[str]) -> list[str]:
    """The values of an option in its row; for a second name of the option, the first's."""
    codes = [code.split() for code in _code(row[0])]
    own = next(words[1:] for words in codes if words[0] == name)
    if name == "DIR":
        return ["DIR"]
    return own or (codes[0][1:] if row[1] != "none" else [])


def _experiment(model: str) -> str:
    """The recipe of a model by the name that their programs know it by; "" where there is none."""
    vitae = re.fullmatch(r"ViTAE_basic_(Tiny|6M|13M|Small|Base|Large|Huge)", model)
    if vitae:
        return f"imagenet/vitae/{vitae[1].lower()}"
    t2t = re.fullmatch(r"T2t_vit_(7|14|t_14)", model, re.IGNORECASE)
    return f"imagenet/t2tvit/t2tvit{t2t[1].lower().replace('_', '')}" if t2t else ""


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _row(flag: str, program: str) -> list[str] | None:
    """(options, what is here, remarks) of an option."""
    other = {"main.py", "validate.py"} - {program}
    for row in _rows():
        names = [code.split()[0] for code in _code(row[0])]
        if flag in names and not any(name in row[0] for name in other):
            return row
    return None


def _rows() -> Iterator[list[str]]:
    """(options, what is here, remarks) of each row."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.is_file() else []
    for line in lines:
        # A bar inside code is escaped.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith(("`-", "`DIR`")):
            yield cells
