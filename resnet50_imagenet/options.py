"""The command line of main.py: one place that names every option, its default and its limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from flow_train import cli
from flow_train.cli import UserError, at_least, not_negative, one_of, positive, share
from flow_train.data.rand_augment import parse_rand_augment
from resnet50_imagenet.models import classification_models, image_size_of

# What OneFlow's generators take.
MOST_SEED = 2**63 - 1
DATA_VARIABLE = "IMAGENET_DIR"
DEFAULT_DATA = "/ssd/dataset/ImageNet/extract"


def build_parser() -> argparse.ArgumentParser:
    """The parser; its options are those of the reference ImageNet script, and the new ones."""
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
        help=f"folder with train/CLASS/*.jpg and val/CLASS/*.jpg (default: ${DATA_VARIABLE}, else "
        "%(default)s)",
    )
    _add_model_options(parser, names)
    _add_training_options(parser)
    _add_data_options(parser)
    _add_run_options(parser)
    _add_distributed_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-a",
        "--arch",
        metavar="ARCH",
        default="resnet50",
        type=one_of(names, "model"),
        help="model; all names stand below",
    )
    group.add_argument(
        "--weights",
        metavar="FILE",
        type=Path,
        help="start from these weights: .pth (torch, zip or legacy) or .safetensors",
    )
    group.add_argument(
        "--pretrained",
        action="store_true",
        help="start from the weights file of this model in $ONEFLOW_ACCEL_WEIGHTS",
    )
    group.add_argument(
        "--reset-head",
        action="store_true",
        help="leave out the classifier's weights, to fine-tune on other classes",
    )
    group.add_argument("--channels-last", action="store_true", help="train in NHWC instead of NCHW")
    group.add_argument(
        "--freeze-bn",
        action="store_true",
        help="keep the running statistics of batch normalization as they are",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", metavar="N", type=at_least(0), default=90, help="epochs to run")
    group.add_argument(
        "--start-epoch", metavar="N", type=at_least(0), default=0, help="epoch to start at"
    )
    group.add_argument(
        "--max-steps", metavar="N", type=at_least(1), help="stop after this many steps in all"
    )
    group.add_argument(
        "-b",
        "--batch-size",
        metavar="N",
        type=at_least(1),
        default=192,
        help="images per step of all processes of this node together",
    )
    group.add_argument(
        "--lr",
        "--learning-rate",
        dest="lr",
        metavar="LR",
        type=not_negative,
        default=0.1,
        help="initial learning rate, divided by 10 every 30 epochs",
    )
    group.add_argument(
        "--momentum", metavar="M", type=not_negative, default=0.9, help="momentum of SGD"
    )
    group.add_argument(
        "--wd",
        "--weight-decay",
        dest="weight_decay",
        metavar="W",
        type=not_negative,
        default=1e-4,
        help="weight decay",
    )
    group.add_argument(
        "--grad-accum-steps",
        metavar="N",
        type=at_least(1),
        default=1,
        help="batches whose gradients one step adds up",
    )
    group.add_argument(
        "--clip-grad",
        metavar="NORM",
        type=positive,
        help="scale gradients down to this norm of all together",
    )
    group.add_argument("--smoothing", metavar="S", type=share, default=0.0, help="label smoothing")
    group.add_argument(
        "--model-ema",
        action="store_true",
        help="keep a moving average of the weights, and validate that",
    )
    group.add_argument(
        "--model-ema-decay", metavar="D", type=share, default=0.9998, help="decay of the average"
    )
    group.add_argument(
        "--graph", action="store_true", help="train or evaluate under nn.Graph, not eagerly"
    )
    group.add_argument(
        "--amp", action="store_true", help="mixed precision, where the device has it; needs --graph"
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=at_least(0, MOST_SEED),
        help="seed of everything random; drawn if absent",
    )


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "-j",
        "--workers",
        metavar="N",
        type=at_least(0),
        default=4,
        help="processes that load images, per training process; 0 loads in the process itself",
    )
    group.add_argument(
        "--image-size",
        metavar="N",
        type=at_least(8),
        help="pixels a side (default: those the model was made for, of most 224)",
    )
    group.add_argument(
        "--scale",
        metavar=("MIN", "MAX"),
        nargs=2,
        type=share,
        default=(0.08, 1.0),
        help="share of a training image's area that a random crop takes",
    )
    group.add_argument(
        "--hflip",
        metavar="P",
        type=share,
        default=0.5,
        help="how often a training image is mirrored",
    )
    group.add_argument(
        "--aa", metavar="POLICY", help="RandAugment, such as rand-m9-mstd0.5-inc1 (timm's grammar)"
    )
    group.add_argument(
        "--reprob", metavar="P", type=share, default=0.0, help="how often a box is erased"
    )
    group.add_argument(
        "--mixup", metavar="ALPHA", type=not_negative, default=0.0, help="alpha of mixup; 0 is off"
    )
    group.add_argument(
        "--cutmix",
        metavar="ALPHA",
        type=not_negative,
        default=0.0,
        help="alpha of CutMix; 0 is off",
    )
    group.add_argument(
        "--mixup-prob",
        metavar="P",
        type=share,
        default=1.0,
        help="how often a batch is mixed where mixup or CutMix is on",
    )
    group.add_argument(
        "--mixup-switch-prob",
        metavar="P",
        type=share,
        default=0.5,
        help="how often it is CutMix where both are on",
    )
    group.add_argument(
        "--mixup-mode",
        choices=("batch", "pair", "elem"),
        default="batch",
        help="what is drawn for: the whole batch, two images, or each",
    )
    cli.add_dummy_option(group)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    cli.add_device_option(group)
    group.add_argument(
        "-e", "--evaluate", action="store_true", help="only evaluate on the validation images"
    )
    group.add_argument(
        "--predictions",
        metavar="FILE.csv",
        type=Path,
        help="with --evaluate: write each image's label and five likeliest classes",
    )
    group.add_argument(
        "--benchmark",
        action="store_true",
        help="only measure the forward pass under nn.Graph: images/s, TFLOP/s, share of peak",
    )
    cli.add_profile_option(group)
    group.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --evaluate or --benchmark: batch norm folded into the convolutions, which is "
        "faster and differs by rounding",
    )
    group.add_argument(
        "--bf16",
        action="store_true",
        help="with --evaluate or --benchmark: compute in bfloat16, where the device has it",
    )
    group.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="checkpoints, metrics, curves (default: runs/ARCH)",
    )
    group.add_argument(
        "--resume",
        metavar="PATH",
        help="continue from this checkpoint; 'auto': from the newest in the output folder, if any",
    )
    group.add_argument(
        "--save-freq",
        metavar="N",
        type=at_least(1),
        default=1000,
        help="steps between checkpoints; one is written at the end of each epoch as well",
    )
    group.add_argument(
        "-p",
        "--print-freq",
        metavar="N",
        type=at_least(1),
        default=10,
        help="steps between log lines; only there the device is waited for",
    )


def _add_distributed_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes",
        "Either launch with `python3 -m oneflow.distributed.launch --nproc_per_node N main.py "
        "--multiprocessing-distributed`, or call main.py with that flag and it launches one "
        "process for each device of this node.",
    )
    group.add_argument(
        "--multiprocessing-distributed",
        action="store_true",
        help="data parallel, one process for each device",
    )
    group.add_argument(
        "--world-size", metavar="N", type=at_least(1), default=1, help="number of nodes"
    )
    group.add_argument(
        "--rank", metavar="N", type=at_least(0), default=0, help="number of this node"
    )
    group.add_argument(
        "--dist-url",
        metavar="URL",
        default="tcp://127.0.0.1:29500",
        help="where node 0 is reached, tcp://HOST:PORT",
    )
    group.add_argument(
        "--dist-backend",
        metavar="NAME",
        help="collective library; only the device's own can be used",
    )
    group.add_argument(
        "--gpu", metavar="N", type=at_least(0), help="use this device and no data parallelism"
    )


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        UserError: options that contradict each other.
    """
    options = build_parser().parse_args(argv)
    if options.weights is not None and options.pretrained:
        raise UserError("--weights and --pretrained both name weights to start from: give one")
    if options.reset_head and options.weights is None and not options.pretrained:
        raise UserError("--reset-head is for weights to start from: add --weights or --pretrained")
    if options.reset_head and options.evaluate:
        raise UserError("--reset-head and --evaluate: a new head has nothing to evaluate")
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
    if options.amp and not options.graph:
        raise UserError("--amp works under nn.Graph only: add --graph")
    if options.bf16 and not (options.evaluate or options.benchmark):
        raise UserError("--bf16 is for inference: add --evaluate or --benchmark")
    if options.bf16 and not options.fold:
        raise UserError("--bf16 folds batch norms as well: leave --no-fold out")
    if options.gpu is not None and options.multiprocessing_distributed:
        raise UserError("--gpu takes one device, --multiprocessing-distributed all: give one")
    if options.scale[0] > options.scale[1] or options.scale[1] == 0:
        raise UserError(f"--scale {options.scale[0]} {options.scale[1]}: MIN MAX, MAX above 0")
    if options.image_size is None:
        options.image_size = image_size_of(options.arch)
    if options.output_dir is None:
        options.output_dir = Path("runs") / options.arch
    return options
