"""Real training in each precision, by the same steps and seed: a table of where the runs end, and
their losses in one picture.

    python -m benchmarks.precision FOLDER --photos DIR --prompts PREFIX --mnist DIR

Trains a ResNet18 on photos (DIR/train and DIR/val), a small GPT-2 on prompts (PREFIX is what
prepare.py wrote; the environment names the vocabulary), and a ViT, dense and with Monarch MLPs, on
MNIST: those whose data are given. A run that is in FOLDER already is not made again. On a CPU
without bfloat16 instructions set ONEFLOW_ACCEL_EMULATE_BFLOAT16=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from oneflow_accel import settings
from oneflow_accel.errors import UserError

import numpy as np

from benchmarks.side_by_side import REPOSITORY
from flow_train import cli
from flow_train.compare.process import run
from flow_train.compare.rows import show
from flow_train.metrics import curves
from flow_train.metrics.log import JSONL_NAME, metric_series, read_metrics

PRECISIONS = ("float32", "float32-bf16-products", "bfloat16")
# The end of a run is the mean loss of this part of its log lines.
END = 0.1


def resnet(data: str, precision: str, out: Path, steps: int) -> list[str]:
    return [
        *("resnet50_imagenet/main.py", data, "-a", "resnet18", "--image-size", "96"),
        *("-b", "25", "--lr", "0.001", "-j", "0", "--seed", "0", "-p", "1", "--epochs", "1000"),
        # A tenth of the usual learning rate for such batches: with more, rounding the last layer
        # alone moved the end by percents.
        *("--smoothing", "0.1", "--channels-last", "--max-steps", str(steps)),
        *("--precision", precision, "--output-dir", str(out)),
    ]


def gpt2(_data: str, precision: str, out: Path, steps: int) -> list[str]:
    config = "libai_projects/projects/MagicPrompt/configs/gpt2_small_cpu.py"
    return [
        *("libai_projects/tools/train_net.py", "--config-file", config),
        *(f"train.train_iter={steps}", "train.max_minutes=null", "train.log_period=5"),
        *("dataloader.train.num_workers=0", "train.evaluation.enabled=false"),
        f"train.output_dir={out}",
        *("train.amp.enabled=true", f"train.amp.precision={precision}"),
    ]


def vit(experiment: str, data: str, precision: str, out: Path, steps: int) -> list[str]:
    return [
        *("-m", "monarch_flow.train", f"experiment={experiment}", f"run_dir={out}"),
        *(f"datamodule.data_dir={data}", f"trainer.precision={precision}"),
        *("datamodule.num_workers=0", "trainer.log_every_n_steps=10"),
        *([f"trainer.max_steps={steps}"] if steps else []),
    ]


# What it is called, the option that names its data, the command, and how many steps; 0: as many as
# the experiment has.
RUNS = (
    ("ResNet18", "photos", resnet, 200),
    ("GPT-2, 17.6 M", "prompts", gpt2, 200),
    ("ViT", "mnist", partial(vit, "mnist/vit"), 0),
    ("ViT, Monarch", "mnist", partial(vit, "mnist/vit-monarch"), 0),
)
Losses = tuple[np.ndarray, np.ndarray]


def trained(command: Sequence[str], data: str, out: Path) -> Path:
    """The run's metrics; it is made where they are not there."""
    done = out / "done"
    if not done.exists():
        environment = {**os.environ, settings.CURVES.name: "off", "MAGICPROMPT_DATA": data}
        out.parent.mkdir(parents=True, exist_ok=True)
        log = out.with_name(f"{out.name}.log")
        ended = run(command, log, {**environment, "PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY)
        if ended.told_to_stop:
            raise KeyboardInterrupt("the same command goes on with this run")
        if ended.code != 0:
            raise UserError(f"{' '.join(command)} ended with {ended.code}: see {log}")
        done.touch()
    return out / JSONL_NAME


def end_of(losses: Losses) -> float:
    values = losses[1]
    return float(values[-max(1, round(END * len(values))) :].mean())


def draw(found: dict[str, dict[str, Losses]], path: Path) -> None:
    """A panel for each model, a line for each precision."""
    figure = curves.new_figure(4.6 * len(found), 3.8, "Training loss by precision")
    for position, (name, by_precision) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(1, len(found), position)
        for (precision, (steps, values)), color in zip(
            by_precision.items(), curves.COLORS, strict=False
        ):
            axes.plot(steps, curves.smoothed(values), color=color, label=precision, linewidth=1.2)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        curves.tidy(axes)
        axes.legend(frameon=False, fontsize=8)
    curves.save_figure(figure, path)


def _run() -> int:
    parser = cli.Parser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs and precision.png go")
    for _, option, *_ in RUNS[:3]:
        parser.add_argument(f"--{option}", help=f"train on these {option}")
    usual = ", ".join(str(steps) for *_, steps in RUNS if steps)
    parser.add_argument("--steps", type=int, help=f"of each run (default: {usual}, 12 epochs)")
    options = parser.parse_args()
    found: dict[str, dict[str, Losses]] = {}
    rows = [["run", *PRECISIONS, "change"]]
    for name, option, command, steps in RUNS:
        data = getattr(options, option)
        if data is None:
            continue
        data = os.path.abspath(data)
        scores = []
        for precision in PRECISIONS:
            place = f"{'-'.join(name.replace(',', '').split())}-{precision}"
            out = (options.folder / place).resolve()
            file = trained(command(data, precision, out, options.steps or steps), data, out)
            lines = read_metrics(file)
            found.setdefault(name, {})[precision] = metric_series(lines, "train", "loss")
            scores.append(metric_series(lines, "val", "acc1")[1])
        ends = [end_of(losses) for losses in found[name].values()]
        changes = " ".join(f"{end / ends[0] - 1:+.2%}" for end in ends[1:])
        rows.append([name, *(f"{end:.4f}" for end in ends), changes])
        if all(len(accuracies) for accuracies in scores):
            last = [accuracies[-1] for accuracies in scores]
            changes = " ".join(f"{each - last[0]:+.2f}" for each in last[1:])
            rows.append([f"{name}, top-1 in %", *(f"{each:.2f}" for each in last), changes])
    if not found:
        parser.error("name the data of at least one run: --photos, --prompts or --mnist")
    show(f"mean loss of the last {END:.0%} of the log lines", rows, width=120)
    draw(found, options.folder / "precision.png")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("benchmarks.precision", _run))
