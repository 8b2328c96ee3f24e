"""The command line of main.py: one place that names every option, its default and its limits."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.precision import PRECISIONS, canonical

from flow_train import cli
from flow_train.cli import UserError, at_least, nearest, not_negative, one_of, positive, share
from flow_train.data.rand_augment import parse_rand_augment
from flow_train.sharding import MODES
from resnet50_imagenet.models import classification_models, image_size_of

# The range of seeds that OneFlow's generators take.
MOST_SEED = 2**63 - 1
BENCHMARKS = ("this", "all")
DATA_VARIABLE = "IMAGENET_DIR"
DEFAULT_DATA = "/ssd/dataset/ImageNet/extract"


class _Options:
    """A group of options, a line each: names, type, default, name of the value, and help text."""

    def __init__(self, parser: cli.Parser, title: str, text: str | None = None) -> None:
        self.group = parser.add_argument_group(title, text)

    def value(
        self, names: str, kind: Any, default: Any, shown: Any, text: str, **more: Any
    ) -> None:
        self.group.add_argument(
            *names.split(), type=kind, default=default, metavar=shown, help=text, **more
        )

    def flag(self, names: str, text: str) -> None:
        self.group.add_argument(*names.split(), action="store_true", help=text)


def build_parser() -> cli.Parser:
    """The parser, with the options of the reference ImageNet script and the new ones."""
    names = classification_models()
    parser = cli.Parser(
        prog="main.py",
        description="Train or evaluate an image classifier on ImageNet with OneFlow.",
        epilog="models: " + " ".join(names),
    )
    parser.add_argument(
        "data",
        metavar="DIR",
        nargs="?",
        default=os.environ.get(DATA_VARIABLE, DEFAULT_DATA),
        help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg (default: "
        f"${DATA_VARIABLE}, else %(default)s)",
    )
    _add_model_options(_Options(parser, "model"), names)
    _add_training_options(_Options(parser, "training"))
    _add_data_options(_Options(parser, "data"))
    _add_run_options(_Options(parser, "run"))
    launch = (
        "Either launch with `python3 -m oneflow.distributed.launch --nproc_per_node N main.py "
        "--multiprocessing-distributed`, or call main.py with that flag and it launches one "
        "process for each device of this node."
    )
    _add_distributed_options(_Options(parser, "several processes", launch))
    return parser


def _add_model_options(add: _Options, names: Sequence[str]) -> None:
    kind = one_of(names, "model")
    add.value("-a --arch", kind, "resnet50", "ARCH", "model; all names stand below")
    text = "start from these weights: .pth (torch, zip or legacy) or .safetensors"
    add.value("--weights", Path, None, "FILE", text)
    text = "start from the weights file of this model in $ONEFLOW_ACCEL_WEIGHTS"
    add.flag("--pretrained", text)
    text = "leave out the classifier's weights, to fine-tune on other classes"
    add.flag("--reset-head", text)
    add.flag("--channels-last", "train in NHWC instead of NCHW")
    add.flag("--freeze-bn", "keep the running statistics of batch normalization as they are")


def _add_training_options(add: _Options) -> None:
    add.value("--epochs", at_least(0), 90, "N", "epochs to run")
    add.value("--start-epoch", at_least(0), 0, "N", "epoch to start at")
    add.value("--max-steps", at_least(1), None, "N", "stop after this many steps in all")
    text = "images per step of all processes of this node together"
    add.value("-b --batch-size", at_least(1), 192, "N", text)
    text = "initial learning rate, divided by 10 every 30 epochs"
    add.value("--lr --learning-rate", not_negative, 0.1, "LR", text, dest="lr")
    add.value("--momentum", not_negative, 0.9, "M", "momentum of SGD")
    names = "--wd --weight-decay"
    add.value(names, not_negative, 1e-4, "W", "weight decay", dest="weight_decay")
    add.value("--grad-accum-steps", at_least(1), 1, "N", "batches whose gradients one step adds up")
    text = "scale gradients down to this norm of all together"
    add.value("--clip-grad", positive, None, "NORM", text)
    add.value("--smoothing", share, 0.0, "S", "label smoothing")
    add.flag("--model-ema", "keep a moving average of the weights, and validate that")
    text = "decay of the average (default: 0.9998)"
    add.value("--model-ema-decay", share, None, "D", text)
    add.flag("--graph", "train or evaluate under nn.Graph, not eagerly")
    text = "; ".join(f"{name}: {what}" for name, what in PRECISIONS.items())
    add.value("--precision --dtype", canonical, None, "NAME", f"{text} (default: float32)")
    add.flag("--amp", "the same as --precision float16")
    text = "what several processes send gradients and add them up in: float32 or bfloat16"
    add.group.add_argument(
        "--reduce-dtype", choices=("float32", "bfloat16"), default="float32", help=text
    )
    text = (
        "cut parameters, gradients and optimizer over the processes, and compute blocks again in "
        "the backward pass (full_shard) or keep their activations, or their weights too; "
        "hybrid_shard cuts within a node; no MODE is full_shard"
    )
    more = {"nargs": "?", "const": "full_shard", "choices": tuple(MODES)}
    add.value("--fsdp", str, None, "MODE", text, **more)
    text = "seed of everything random; drawn if absent"
    add.value("--seed", at_least(0, MOST_SEED), None, "N", text)


def _add_data_options(add: _Options) -> None:
    text = "processes that load images, per training process; 0 loads in the process itself"
    add.value("-j --workers", at_least(0), 4, "N", text)
    text = "pixels a side (default: those the model was made for, of most 224)"
    add.value("--image-size", at_least(8), None, "N", text)
    text = "share of a training image's area that a random crop takes"
    add.value("--scale", share, (0.08, 1.0), ("MIN", "MAX"), text, nargs=2)
    add.value("--hflip", share, 0.5, "P", "how often a training image is mirrored")
    text = "RandAugment, such as rand-m9-mstd0.5-inc1 (timm's grammar)"
    add.value("--aa", str, None, "POLICY", text)
    add.value("--reprob", share, 0.0, "P", "how often a box is erased")
    add.value("--mixup", not_negative, 0.0, "ALPHA", "alpha of mixup; 0 is off")
    add.value("--cutmix", not_negative, 0.0, "ALPHA", "alpha of CutMix; 0 is off")
    text = "how often a batch is mixed where mixup or CutMix is on"
    add.value("--mixup-prob", share, 1.0, "P", text)
    text = "how often it is CutMix where both are on"
    add.value("--mixup-switch-prob", share, 0.5, "P", text)
    text = "what is drawn for: the whole batch, two images, or each"
    add.value("--mixup-mode", str, "batch", None, text, choices=("batch", "pair", "elem"))
    cli.add_dummy_option(add.group)


def _add_run_options(add: _Options) -> None:
    cli.add_device_option(add.group)
    add.flag("-e --evaluate", "only evaluate on the validation images")
    text = "with --evaluate: write each image's label and five likeliest classes"
    add.value("--predictions", Path, None, "FILE.csv", text)
    text = (
        "only measure the forward pass under nn.Graph: images/s, TFLOP/s, share of the peak; all: "
        "in each layout and precision"
    )
    more = {"nargs": "?", "const": "this", "choices": BENCHMARKS}
    add.value("--benchmark", str, None, "all", text, **more)
    cli.add_profile_option(add.group)
    add.group.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --evaluate or --benchmark: batch norm folded into the convolutions, which is "
        "faster and differs by rounding",
    )
    add.flag("--bf16", "the same as --precision bfloat16")
    text = "checkpoints, metrics, curves (default: runs/ARCH)"
    add.value("--output-dir", Path, None, "DIR", text)
    text = "continue from this checkpoint; 'auto': from the newest in the output folder, if any"
    add.value("--resume", str, None, "PATH", text)
    text = "steps between checkpoints; one is written at the end of each epoch as well"
    add.value("--save-freq", at_least(1), 1000, "N", text)
    text = "steps between log lines; only there the device is waited for"
    add.value("-p --print-freq", at_least(1), 10, "N", text)


def _add_distributed_options(add: _Options) -> None:
    text = "data parallel, one process for each device"
    add.flag("--multiprocessing-distributed", text)
    add.value("--world-size", at_least(1), 1, "N", "number of nodes")
    add.value("--rank", at_least(0), 0, "N", "number of this node")
    text = "where node 0 is reached, tcp://HOST:PORT"
    add.value("--dist-url", str, "tcp://127.0.0.1:29500", "URL", text)
    text = "collective library; only the device's own can be used"
    add.value("--dist-backend", str, None, "NAME", text)
    add.value("--gpu", at_least(0), None, "N", "use this device and no data parallelism")


def _with_values(argv: Sequence[str]) -> list[str]:
    """The command line with the value of a bare --fsdp or --benchmark, before DIR, too."""
    words = list(argv)
    for number, word in enumerate(words):
        known = {"--fsdp": tuple(MODES), "--benchmark": BENCHMARKS}.get(word)
        after = words[number + 1] if number + 1 < len(words) else ""
        if known and (Path(after).is_dir() or not nearest(after, known)):
            words[number] = f"{word}={known[0]}"
    return words


def _settle_precision(options: argparse.Namespace) -> None:
    """Make one of --precision, --amp and --bf16."""
    short = {"--amp": "float16" * options.amp, "--bf16": "bfloat16" * options.bf16}
    given = {**short, "--precision": options.precision}
    given = {name: value for name, value in given.items() if value}
    if len(set(given.values())) > 1:
        raise UserError(f"{' and '.join(given)} ask for different precisions: give one")
    options.precision = next(iter(given.values()), "float32")
    del options.amp, options.bf16


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; UserError where options contradict each other."""
    options = build_parser().parse_args(_with_values(sys.argv[1:] if argv is None else argv))
    _settle_precision(options)
    for wrong, text in _contradictions(options):
        if wrong:
            raise UserError(text)
    if options.aa:
        parse_rand_augment(options.aa)
    if options.model_ema_decay is None:
        options.model_ema_decay = 0.9998
    if options.image_size is None:
        options.image_size = image_size_of(options.arch)
    if options.output_dir is None:
        options.output_dir = Path("runs") / options.arch
    return options


def _contradictions(of: argparse.Namespace) -> Iterator[tuple[Any, str]]:
    """What must not be, and what to say of it."""
    given, low, high = of.weights is not None, *of.scale
    infers = of.evaluate or of.benchmark
    yield given and of.pretrained, "--weights and --pretrained both name weights: give one"
    text = "--reset-head is for weights to start from: add --weights or --pretrained"
    yield of.reset_head and not given and not of.pretrained, text
    text = "--reset-head and --evaluate: a new head has nothing to evaluate"
    yield of.reset_head and of.evaluate, text
    yield of.predictions is not None and not of.evaluate, "--predictions is for -e: add that"
    yield of.smoothing == 1, "--smoothing 1 leaves nothing of the labels: give less"
    text = "--model-ema-decay is for a moving average: add --model-ema"
    yield of.model_ema_decay is not None and not of.model_ema, text
    text = "--profile is for eager training: leave --graph, --evaluate and --benchmark out"
    yield of.profile and (of.graph or infers), text
    text = "--fsdp is for eager training in NCHW: leave --graph, --channels-last out"
    yield of.fsdp and (of.graph or of.channels_last), text
    text = "--fsdp trains in float32 or bfloat16: take --precision bfloat16"
    yield of.fsdp and of.precision == "float16", text
    text = f"--precision {of.precision} is for training: take bfloat16"
    yield infers and of.precision not in ("float32", "bfloat16"), text
    text = "inference in bfloat16 folds batch norms as well: leave --no-fold out"
    yield infers and not of.fold and (of.precision == "bfloat16" or of.benchmark == "all"), text
    text = "--reduce-dtype is for eager training of whole models: leave --graph, --fsdp out"
    yield of.reduce_dtype != "float32" and (of.graph or of.fsdp), text
    text = "--gpu takes one device, --multiprocessing-distributed all: give one"
    yield of.gpu is not None and of.multiprocessing_distributed, text
    yield low > high or high == 0, f"--scale {low} {high}: MIN MAX, MAX above 0"
