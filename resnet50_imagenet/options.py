"""The command line of main.py: one place that names every option, its default and its limits."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.precision import PRECISIONS, canonical

from flow_train import cli
from flow_train.cli import UserError, at_least, nearest, not_negative, one_of, positive, share
from flow_train.data.rand_augment import parse_rand_augment
from flow_train.steps.sharding import MODES
from resnet50_imagenet.models import classification_models, image_size_of

# The range of seeds that OneFlow's generators take.
MOST_SEED = 2**63 - 1
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
    text = "only measure the forward pass under nn.Graph: images/s, TFLOP/s, share of peak"
    add.flag("--benchmark", text)
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


def _with_mode(argv: Sequence[str]) -> list[str]:
    """The command line with the mode of a bare --fsdp, before DIR, too."""
    words = list(argv)
    for number, word in enumerate(words):
        after = words[number + 1] if number + 1 < len(words) else ""
        if word == "--fsdp" and (Path(after).is_dir() or not nearest(after, MODES)):
            words[number] = "--fsdp=full_shard"
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
    options = build_parser().parse_args(_with_mode(sys.argv[1:] if argv is None else argv))
    _settle_precision(options)
    if options.weights is not None and options.pretrained:
        raise UserError("--weights and --pretrained both name weights to start from: give one")
    if options.reset_head and options.weights is None and not options.pretrained:
        raise UserError("--reset-head is for weights to start from: add --weights or --pretrained")
    if options.reset_head and options.evaluate:
        raise UserError("--reset-head and --evaluate: a new head has nothing to evaluate")
    if options.model_ema_decay is not None and not options.model_ema:
        raise UserError("--model-ema-decay is for a moving average: add --model-ema")
    options.model_ema_decay = 0.9998 if options.model_ema_decay is None else options.model_ema_decay
    if options.model_ema and options.benchmark:
        raise UserError("--model-ema is for training: leave it out")
    if options.model_ema and options.evaluate and options.resume is None:
        raise UserError("--model-ema evaluates a checkpoint's moving averages: add --resume PATH")
    if options.predictions is not None and not options.evaluate:
        raise UserError("--predictions is for --evaluate: add -e")
    if options.smoothing == 1:
        raise UserError("--smoothing 1 leaves nothing of the labels: give less")
    if options.aa:
        parse_rand_augment(options.aa)
    if options.profile and (options.graph or options.evaluate or options.benchmark):
        raise UserError(
            "--profile is for eager training: leave --graph, --evaluate and --benchmark out"
        )
    if options.fsdp and (options.graph or options.channels_last):
        raise UserError("--fsdp is for eager training in NCHW: leave --graph, --channels-last out")
    inference = options.evaluate or options.benchmark
    if inference and options.precision not in ("float32", "bfloat16"):
        raise UserError(f"--precision {options.precision} is for training: take bfloat16")
    if inference and options.precision == "bfloat16" and not options.fold:
        raise UserError("inference in bfloat16 folds batch norms as well: leave --no-fold out")
    if options.fsdp and options.precision == "float16":
        raise UserError("--fsdp trains in float32 or bfloat16: take --precision bfloat16")
    if options.reduce_dtype != "float32" and (options.graph or options.fsdp):
        raise UserError(
            "--reduce-dtype is for eager training of whole models: leave --graph, --fsdp out"
        )
    if options.gpu is not None and options.multiprocessing_distributed:
        raise UserError("--gpu takes one device, --multiprocessing-distributed all: give one")
    if options.scale[0] > options.scale[1] or options.scale[1] == 0:
        raise UserError(f"--scale {options.scale[0]} {options.scale[1]}: MIN MAX, MAX above 0")
    if options.image_size is None:
        options.image_size = image_size_of(options.arch)
    if options.output_dir is None:
        options.output_dir = Path("runs") / options.arch
    return options
