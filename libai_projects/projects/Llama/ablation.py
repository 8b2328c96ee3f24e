"""`pretrain.py --ablate TABLE`: what each fused operation is worth, beside the diary's table.

Each row is a fresh process of pretrain.py, as memory pools and aborts must not reach the next row.
All rows run in turns, `--turns` times, and a row's seconds count beside those of use_all in the
same turn: the speed of a machine that does other work changes from one minute to the next.
OUTPUT/TABLE.md, .csv and .png hold the result, OUTPUT/TABLE/ROW what a row's process wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import launched, settings
from oneflow_accel.backends import Backend
from oneflow_accel.errors import DataError, UserError
from oneflow_accel.kernels import plugin

import oneflow as flow

from flow_train.checkpoint.folders import checkpoint_folder
from flow_train.compare import process
from flow_train.compare.rows import draw_bars, markdown, ratio, write_csv
from flow_train.files import replace_file
from flow_train.metrics.console import Progress, format_eta
from flow_train.metrics.curves import COLORS, new_figure, save_figure
from flow_train.metrics.log import JSONL_NAME, metric_series, read_metrics
from flow_train.metrics.peak import peak_of
from libai_projects.projects.Llama import diary
from libai_projects.projects.Llama import flags as flag_table
from libai_projects.projects.Llama.estimate import Job

SCRIPT = Path(__file__).resolve().parent / "pretrain.py"
ROW_NAME = "row.json"
ITERATIONS = 15
NEVER = 1_000_000_000
# Rows compute the same in float32, only with sums in another order. That moves a loss by some 1e-7
# of it, and 15 small updates of weights hardly more; a wrong gradient moves its norm by percent. In
# other precisions a fused operator leaves out roundings, of up to 0.4 % each.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 1e-2
COMPARED = {"loss": "loss", "grad_norm": "norm of the gradients"}
REFERENCE = "use_all"
# Seconds of the first iteration that counts, medians from there on, peak memory in 1e9 bytes, and
# how tables and lines have them.
FIGURES = {
    "first": ".4g",
    "seconds": ".4g",
    "tokens_per_second": ".0f",
    "mfu": ".2f",
    "memory": ".3f",
    "loss": ".6g",
}
# What rows call a flag that they switch.
FLAGS = {
    "flash": "use_flash",
    "rope": "use_fused_rope",
    "cross_entropy": "use_fused_cross_entropy",
    "rmsnorm": "use_fused_rmsnorm",
    "swiglu": "use_fused_swiglu",
    "fused_adamw": "fused_adamw",
}
NOTES = (
    "the peak of memory is without the last iteration, which writes a checkpoint; added GB are "
    f"those beyond {REFERENCE}'s",
    "MFU counts what is computed; by the diary's formula, in which the embedding is a product, it "
    "may exceed 100 %",
    f"time x: the seconds over those of {REFERENCE}, ours in the same turn, and the diary's; "
    f"spread: the largest less the smallest of all turns, {REFERENCE}'s over its median",
    "peak GB are 1e9 bytes, on a CPU of the whole process; the diary's GB are MiB / 1000, and its "
    "device one A800-80G",
)

# A row, and which of its turns.
Turn = tuple[str, int]
# Runs pretrain.py with such arguments and environment, its output to a file; the exit code.
Runner = Callable[[Sequence[str], Mapping[str, str], Path], int]


@dataclass(frozen=True)
class Result:
    """What a row's run was measured at: FIGURES by name, and COMPARED by finished iterations;
    `ratios` are its seconds over those of use_all, by turn. A row without figures has a `note`, and
    one that failed the last word of its process as `error`."""

    figures: Mapping[str, float | None] = field(default_factory=dict)
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    ratios: tuple[float, ...] = ()
    note: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> float | None:
        return max(self.ratios) - min(self.ratios) if len(self.ratios) > 1 else None


# Reads what a row's process wrote into a folder.
Reader = Callable[[Path], Result]
SDPA = Result(note="n/a (PyTorch's own operator)")


def run(flags: flag_table.Options, argv: Sequence[str], runner: Runner | None = None) -> int:
    """Run the rows of table `flags.ablate` that are not finished in `flags.output_dir`, write and
    print the table.

    Returns:
        0, or 1 where a row failed or its losses are not those of use_all.

    Raises:
        UserError: flags that the rows set themselves, or too few iterations.
    """
    _check(flags)
    name, output = flags.ablate, Path(flags.output_dir)
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    backend = oneflow_accel.select_device(flags.device or None)
    machine = f"{backend.properties().name}, {plugin.state().num_threads} threads"
    peak = _peak(output / "peak.json", machine, flags, backend)
    # Of many short runs nobody looks at the curves.
    environment = {**os.environ, settings.PEAK.name: str(peak), settings.CURVES.name: "off"}
    lines = [_tokens(flags), *_switched_off(flags, environment.pop(settings.DISABLE.name, ""))]
    print("\n".join(lines))
    rows = [each.name for each in diary.TABLES[name]]
    lines.append(
        f"iterations count from 0, as in the diary: the median is of iteration {flags.warm_up} on"
    )
    counted, asked = Job.of(flags).share_computed, {}

    def read_row(place: Path) -> Result:
        return read(place / JSONL_NAME, flags.warm_up, counted)

    for turn in range(1, flags.turns + 1):
        for row in rows:
            if switches(name, row) is not None:
                command = row_argv(name, row, flags, argv, turn)
                asked[row, turn] = {"argv": command, "machine": machine, "peak_tflops": peak}
    known = {each: _finished(folder / _slug(*each), asked[each], read_row) for each in asked}
    found = {each: result for each, result in known.items() if result is not None}
    with Progress(len(asked), "row", done=len(found)) as progress:
        for number, (each, setting) in enumerate(asked.items(), start=1):
            said = f"[{number}/{len(asked)}] {each[0]}"
            if each in found:
                progress.print(f"{said}: {_in_words(found[each])} (from an earlier start)")
                continue
            progress.print(f"{said}: running, ETA {format_eta(progress.eta_seconds())}")
            found[each] = _run_row(
                folder / _slug(*each), setting, environment, runner or start, read_row
            )
            progress.update()
            progress.print(f"{said}: {_in_words(found[each])}")
    turns = {row: [found[each] for each in asked if each[0] == row] or [SDPA] for row in rows}
    results = merged(turns)
    tolerance = TOLERANCE if flags.precision == "float32" else ROUNDED_TOLERANCE
    wrong, largest = disagreements(results, tolerance)
    problems = [f"{row}: {result.error}" for row, result in results.items() if result.error]
    problems += wrong
    if not problems:
        lines.append(
            f"losses and norms of gradients are {REFERENCE}'s at each iteration, to {tolerance:g} "
            f"of them; the largest difference is {largest:.1e}"
        )
    unsure = [
        row
        for row, result in results.items()
        if row != REFERENCE and result.spread and result.spread > abs((result.ratio or 0) - 1)
    ]
    if unsure:
        lines.append(
            f"WARNING: {', '.join(unsure)}: between turns their times vary by more than they "
            f"differ from {REFERENCE}'s; take more --turns, or a machine that does nothing else"
        )
        print(lines[-1])
    lines += [f"measured on {_origin(folder, asked)}", f"MFU is of {peak:.4g} TFLOP/s", *NOTES]
    cells = table(diary.TABLES[name], results)
    text = markdown([[cell or "-" for cell in row] for row in cells], ("row", "note"), padded=True)
    parts = [f"# {name}: fused operations off by turns", _list(lines), text]
    parts += ["Wrong:", _list(problems)] if problems else []
    parts.append(f"![seconds, MFU and memory of each row]({name}.png)\n")
    replace_file(output / f"{name}.md", "\n\n".join(parts).encode())
    write_csv(output / f"{name}.csv", cells)
    draw(diary.TABLES[name], results, f"{name}: {machine}", output / f"{name}.png")
    print("", text, *problems, sep="\n")
    print("written: " + ", ".join(str(output / f"{name}.{end}") for end in ("md", "csv", "png")))
    return 1 if problems else 0


def merged(turns: Mapping[str, Sequence[Result]]) -> dict[str, Result]:
    """The results of each row's turns as one: medians, and `ratios`. One that failed stands for
    all."""
    found = {}
    base = [result.figures.get("seconds") for result in turns[REFERENCE]]
    for row, results in turns.items():
        found[row] = next((each for each in results if not each.figures), results[0])
        if not found[row].figures:
            continue
        figures = {name: _median([each.figures[name] for each in results]) for name in FIGURES}
        # The losses of all turns are the same, or should be.
        figures["loss"] = results[0].figures["loss"]
        # use_all's beside its own median.
        beside = [figures["seconds"]] * len(results) if row == REFERENCE else base
        pairs = zip(results, beside, strict=True)
        ratios = tuple(each.figures["seconds"] / other for each, other in pairs if other)
        found[row] = dataclasses.replace(results[0], figures=figures, ratios=ratios)
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def switches(table: str, row: str) -> dict[str, bool] | None:
    """The flags of a row; None for one of an operator that is PyTorch's alone."""
    if "sdpa" in row:
        return None
    if row in ("naive", REFERENCE, "fused_adamw"):
        on = dict.fromkeys(flag_table.FUSED, row != "naive")
        on["fused_adamw"] &= table != "table1" or row == "fused_adamw"
    elif row.startswith("w/o "):
        on = {**(switches(table, REFERENCE) or {}), FLAGS[row.removeprefix("w/o ")]: False}
    else:
        names = [FLAGS[name] for name in row.removeprefix("just ").split(", ")]
        on = {flag: flag in names for flag in flag_table.FUSED}
    return on


def row_argv(
    table: str, row: str, flags: flag_table.Options, argv: Sequence[str], turn: int = 1
) -> list[str]:
    """The command line of a row: the user's, then what the row sets, as the last one counts."""
    before, ours = ["", *argv], ("--ablate", "--turns", "--warm_up")
    own = [
        text
        for text, last in zip(argv, before, strict=False)
        if text.split("=")[0] not in ours and last not in ours
    ]
    if not flags.data:
        own.append("--dummy=true")
    if "max_iters" not in flags.model_fields_set:
        own.append(f"--max_iters={ITERATIONS}")
    own += [f"--{flag}={str(on).lower()}" for flag, on in (switches(table, row) or {}).items()]
    if table == "table3":
        own.append("--graph=true")
    own += ["--log_interval=1", "--eval_interval=0", f"--save_interval={NEVER}", "--resume=false"]
    return [*own, f"--output_dir={Path(flags.output_dir) / table / _slug(row, turn)}"]


def start(argv: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """A `Runner`: pretrain.py in a process of its own."""
    ended = process.run([str(SCRIPT), *argv], output, environment)
    if ended.told_to_stop:
        raise KeyboardInterrupt("the same command goes on with this row")
    return ended.code


def read(path: Path, warm_up: int, counted: float = 1.0) -> Result:
    """The figures of a row's metrics.jsonl, its MFU times `counted`. DataError where no iteration
    after `warm_up` is timed."""
    try:
        lines = [line for line in read_metrics(path) if line["split"] == "train"]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    series = {
        name: dict(zip(steps.tolist(), values.tolist(), strict=True))
        for name in (*COMPARED, "step_seconds", "tokens_per_second", "mfu", "peak_memory_gb")
        for steps, values in [metric_series(lines, "train", name)]
    }
    medians = {
        name: _median([value for step, value in values.items() if step > warm_up])
        for name, values in series.items()
    }
    if medians["step_seconds"] is None:
        raise DataError(f"{path} has the time of no iteration after the first {warm_up}")
    # The last line is written after the last checkpoint, which takes memory too.
    memory, losses = list(series["peak_memory_gb"].values()), list(series["loss"].values())
    figures = {
        "first": series["step_seconds"].get(warm_up + 1),
        "seconds": medians["step_seconds"],
        "tokens_per_second": medians["tokens_per_second"],
        "mfu": None if medians["mfu"] is None else counted * medians["mfu"],
        "memory": max(memory[:-1] or memory, default=None),
        "loss": losses[-1] if losses else None,
    }
    return Result(figures, {name: series[name] for name in COMPARED})


def disagreements(results: Mapping[str, Result], tolerance: float) -> tuple[list[str], float]:
    """Where rows leave use_all's values by more than `tolerance` of them, the first place of each
    row in words, and the largest difference of all rows as a share."""
    found, largest = [], 0.0
    for row, result in results.items():
        if row == REFERENCE or not result.curves:
            continue
        wrong: list[tuple[int, str]] = []
        for name, words in COMPARED.items():
            expected, values = results[REFERENCE].curves.get(name, {}), result.curves[name]
            for step, value in expected.items():
                off = abs(values[step] / value - 1) if step in values and value else float("inf")
                largest = max(largest, off)
                if off > tolerance:
                    ours = f"{values[step]:.6g}" if step in values else "not a finite number"
                    text = f"{row}: the {words} of step {step} is {ours}, {REFERENCE}'s {value:.6g}"
                    wrong.append((step, text))
        if wrong:
            found.append(min(wrong, key=lambda each: each[0])[1])
    return found, largest


def table(rows: Sequence[diary.Row], results: Mapping[str, Result]) -> list[list[str]]:
    """The rows and their heads; "" where there is no figure."""
    theirs, base = _of_reference(rows), results[REFERENCE].figures.get("memory")
    heads = ["row", "first s", "median s", "tokens/s", "MFU %", "peak GB", "last loss", "added GB"]
    heads += ["time x", "spread", "diary s", "diary MFU %", "diary GB", "diary added GB"]
    heads += ["diary time x", "note"]
    forms = [*FIGURES.values(), ".3f", *[".2f"] * 7]
    cells = [heads]
    for row in rows:
        ours = results[row.name]
        figures = [*(ours.figures.get(name) for name in FIGURES)]
        figures += [_beyond(ours.figures.get("memory"), base), ours.ratio, ours.spread]
        figures += [row.seconds, row.mfu, row.memory, _beyond(row.memory, theirs.memory)]
        figures.append(ratio(row.seconds, theirs.seconds))
        texts = ["" if v is None else f"{v:{form}}" for v, form in zip(figures, forms, strict=True)]
        note = "; ".join([ours.note] * bool(ours.note) + ["diary: error"] * (not row.seconds))
        cells.append([row.name, *texts, note])
    return cells


def _beyond(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def draw(rows: Sequence[diary.Row], results: Mapping[str, Result], title: str, path: Path) -> None:
    """Three panels of bars, a bar for each row; a mark stands where the diary's row would, were its
    use_all ours."""
    figure = new_figure(13, 0.42 * len(rows) + 1.8, title)
    panels = {"seconds": "seconds of a step", "mfu": "MFU, %", "memory": "peak memory, GB"}
    grid = figure.subplots(1, len(panels))
    for axes, (name, label) in zip(grid, panels.items(), strict=True):
        base = results[REFERENCE].figures.get(name)
        theirs = getattr(_of_reference(rows), name)
        ratios = [ratio(getattr(row, name), theirs) for row in rows]
        marks = [base * each if base and each else None for each in ratios]
        values = [[results[row.name].figures.get(name)] for row in rows]
        draw_bars(axes, values, marks=marks, mark_color=COLORS[3], colors=COLORS[:1], inside=True)
        axes.set_xlabel(label)
        axes.set_yticks([])
    names = [": ".join(filter(None, (row.name, results[row.name].note))) for row in rows]
    grid[0].set_yticks(range(len(rows)), names)
    legend = "◆ the diary's ratio to its use_all"
    figure.text(0.99, 0.99, legend, color=COLORS[3], ha="right", va="top")
    save_figure(figure, path)


def _check(flags: flag_table.Options) -> None:
    if launched.launched():
        raise UserError("--ablate starts a process for each row: run it without a launcher")
    switched = {*flag_table.FUSED, "attn_impl"} & flags.model_fields_set
    if switched:
        theirs = ", ".join(f"--{flag}" for flag in sorted(switched))
        raise UserError(f"--ablate switches these itself, leave them out: {theirs}")
    if "max_iters" in flags.model_fields_set and flags.max_iters <= flags.warm_up:
        raise UserError(
            f"--max_iters={flags.max_iters}: the first {flags.warm_up} iterations of a row do not "
            f"count (--warm_up), so at least {flags.warm_up + 1} are needed"
        )


def _tokens(flags: flag_table.Options) -> str:
    steps = flag_table.accumulation_steps(flags)
    batch, length = flags.batch_size, flags.max_seq_len
    return (
        f"tokens per iteration: {steps * batch * length:,} = {steps} gradient accumulation steps x "
        f"1 process x batch size {batch} x {length} tokens (the diary's line says 262,144, which "
        f"contradicts its own product 16 x 1 x 2 x 2048 = {diary.TOKENS:,})"
    )


def _switched_off(flags: flag_table.Options, from_environment: str) -> list[str]:
    """What is off in all rows, and what would be if the environment counted."""
    lines = [f"switched off in each row, by --disable: {flags.disable}"] if flags.disable else []
    # pretrain.py has set the variable by the flags.
    if from_environment not in ("", ",".join(flag_table.disabled(flags))):
        lines.append(
            f"{settings.DISABLE.name}={from_environment} does not count in the rows, --disable does"
        )
    return lines


def _peak(path: Path, machine: str, flags: flag_table.Options, backend: Backend) -> float:
    """TFLOP/s, stated or measured, but once: rows that are run later have the same."""
    dtype = "bfloat16" if flags.precision == "float32-bf16-products" else flags.precision
    saved, of = process.noted(path), f"{machine}, {dtype}"
    if settings.PEAK.name not in os.environ and saved.get("of") == of:
        return float(saved["tflops"])
    tflops = peak_of(backend, dtype).flops / 1e12
    replace_file(path, json.dumps({"of": of, "tflops": tflops}).encode())
    return tflops


def _slug(row: str, turn: int) -> str:
    """The name of the folder of a row's turn."""
    again = f"_turn_{turn}" if turn > 1 else ""
    return re.sub(r"\W+", "_", row.replace("w/o", "without")) + again


def _finished(place: Path, setting: Mapping[str, Any], read_row: Reader) -> Result | None:
    """What an earlier start has found of a row, if it ran as is asked for."""
    saved = process.noted(place / ROW_NAME)
    if any(saved.get(key) != value for key, value in setting.items()):
        return None
    with contextlib.suppress(DataError):
        return read_row(place)
    return None


def _run_row(
    place: Path,
    setting: Mapping[str, Any],
    environment: Mapping[str, str],
    runner: Runner,
    read_row: Reader,
) -> Result:
    place.mkdir(parents=True, exist_ok=True)
    (place / ROW_NAME).unlink(missing_ok=True)
    code = runner(setting["argv"], environment, place / process.OUTPUT)
    # 15 GB of the diary's model.
    shutil.rmtree(checkpoint_folder(place), ignore_errors=True)
    if code:
        return Result(note="error", error=_last_words(place / process.OUTPUT, code))
    try:
        result = read_row(place)
    except DataError as error:
        return Result(note="error", error=str(error))
    versions, today = f"oneflow {flow.__version__}", date.today().isoformat()
    content = {**setting, "versions": versions, "date": today}
    replace_file(place / ROW_NAME, json.dumps(content, indent=1).encode())
    return result


def _last_words(path: Path, code: int) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A warning may come after what ended the process.
    errors = [line for line in lines if "error" in line.lower()]
    how = f"ended with code {code}" if code > 0 else f"was ended by signal {-code}"
    return f"{how}: {(errors or lines or ['it said nothing'])[-1]} ({path})"


def _origin(folder: Path, turns: Iterable[Turn]) -> str:
    """Machines, versions and dates of the rows."""
    saved = [process.noted(folder / _slug(*each) / ROW_NAME) for each in turns]
    parts = [
        ", ".join(sorted({row[key] for row in saved if key in row}))
        for key in ("machine", "versions", "date")
    ]
    return "; ".join(part for part in parts if part) or "nothing"


def _in_words(result: Result) -> str:
    if result.error:
        return f"FAILED, {result.error}"
    forms = {"seconds": "{:.4g} s", "mfu": "MFU {:.1f} %", "memory": "{:.2f} GB"}
    forms["loss"] = "loss {:.5g}"
    values = [(form, result.figures[name]) for name, form in forms.items()]
    return ", ".join(form.format(value) for form, value in values if value is not None)


def _of_reference(rows: Sequence[diary.Row]) -> diary.Row:
    return next(row for row in rows if row.name == REFERENCE)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
