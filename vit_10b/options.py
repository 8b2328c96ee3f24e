"""The options of `run_vit_training.py`: one place for names, defaults and checks."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from oneflow_accel.errors import UserError
from oneflow_accel.precision import PRECISIONS, canonical

from flow_train import cli
from flow_train.cli import at_least, not_negative, positive, share
from vit_10b.model import Shape

GATHER_DTYPES = ("float32", "float16", "bfloat16")
# float16 needs a scaled loss.
_PRECISIONS = [name for name in PRECISIONS if name != "float16"]
_SHAPE = Shape()


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="run_vit_training.py",
        description="Train a vision transformer whose parameters, gradients and optimizer are cut "
        "over the processes. The defaults are a model of 10 billion parameters.",
    )
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_sharding(parser.add_argument_group("sharding"))
    _add_run(parser.add_argument_group("run"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "folder with train/CLASS/*.jpg and val/CLASS/*.jpg"
    add("--data_dir", type=Path, default=Path("/datasets/imagenet-1k"), metavar="DIR", help=text)
    text = "black images of class 0, as many as ImageNet has; no disk"
    add("--fake_data", action="store_true", help=text)
    text = "processes that load images, per training process"
    add("--num_workers", type=at_least(0), default=4, metavar="N", help=text)


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    sizes = (
        ("image_size", "pixels a side"),
        ("patch_size", "pixels a side of a patch; divides the image"),
        ("embed_dim", "width of a token"),
        ("num_heads", "attention heads; divide the width"),
        ("num_blocks", "transformer blocks"),
        ("num_classes", "classes of --fake_data; a data folder has its own"),
    )
    for name, text in sizes:
        default = getattr(_SHAPE, name)
        add(f"--{name}", type=at_least(1), default=default, metavar="N", help=text)
    text = "hidden width of an MLP over that of a token"
    add("--mlp_ratio", type=positive, default=_SHAPE.mlp_ratio, metavar="R", help=text)
    for name, text in (
        ("pos_dropout", "dropout after the position embedding"),
        ("att_dropout", "dropout of attention weights"),
        ("mlp_dropout", "dropout in the MLPs and after attention"),
    ):
        add(f"--{name}", type=share, default=0.0, metavar="P", help=text)
    text = (
        "first weights of the linear layers: as the framework's constructors draw them, which is "
        "what the published code does, or normal with deviation 0.02, which it means to do"
    )
    add("--init", choices=("framework", "timm"), default="framework", help=text)


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "images per step of all processes together"
    add("--batch_size", type=at_least(1), default=1024, metavar="N", help=text)
    add("--num_epochs", type=at_least(1), default=300, metavar="N", help="epochs of the run")
    text = "stop after this many steps in all; the schedule is still that of --num_epochs"
    add("--max_steps", type=at_least(1), default=None, metavar="N", help=text)
    add("--lr", type=not_negative, default=1e-3, metavar="LR", help="learning rate of AdamW")
    text = "weight decay, of every parameter"
    add("--weight_decay", type=not_negative, default=0.1, metavar="W", help=text)
    text = "largest norm of all gradients together; 0 or less: no clipping"
    add("--clip_grad_norm", type=_finite, default=1.0, metavar="NORM", help=text)
    text = "steps in which the learning rate rises from 0"
    add("--warmup_steps", type=at_least(0), default=10000, metavar="N", help=text)
    text = "seed of everything random; drawn if absent"
    add("--seed", type=at_least(0, 2**63 - 1), default=None, metavar="N", help=text)


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--no_grad_ckpt",
        dest="grad_ckpt",
        action="store_false",
        help="keep the activations of each block instead of computing them again in the backward "
        "pass (activation checkpointing)",
    )
    text = "keep the gathered weights until the backward pass (ZeRO stage 2)"
    add(
        "--no_reshard_after_forward",
        dest="reshard_after_forward",
        action="store_false",
        help=text,
    )
    text = "one shard per block, not one per tensor"
    add("--flatten_parameters", action="store_true", help=text)
    text = "the whole model in each process, and gradients averaged"
    add("--run_without_fsdp", action="store_true", help=text)
    text = "no meaning here: every block is made and cut in host memory before the next is made"
    add("--shard_on_cpu", action="store_true", help=text)
    text = "no meaning here: there is no lazy graph to cut"
    add("--mark_step_after_forward", action="store_true", help=text)
    text = "cut over groups of N neighbouring processes, with copies across them (default: all)"
    add("--shard_group", type=at_least(1), default=None, metavar="N", help=text)
    text = "pad shards to a multiple of N numbers"
    add("--shard_multiple", type=at_least(1), default=1, metavar="N", help=text)
    text = "gather the next block while one runs; takes the memory of a block"
    add("--prefetch", action="store_true", help=text)
    text = f"what is computed in: {', '.join(_PRECISIONS)}; weights stay float32"
    names = ("--precision", "--dtype", "--compute_dtype")
    add(*names, type=canonical, default="float32", metavar="NAME", help=text)
    text = "what shards are sent as; they stay float32"
    add("--gather_dtype", choices=GATHER_DTYPES, default="float32", help=text)


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "checkpoints, metrics and curves; hosts may have a folder of their own each"
    folder = Path(tempfile.gettempdir()) / "vit_fsdp"
    add("--ckpt_dir", type=Path, default=folder, metavar="DIR", help=text)
    text = "go on after epoch N from its checkpoint; 0 begins a run"
    add("--resume_epoch", type=at_least(0), default=0, metavar="N", help=text)
    text = "'auto': go on from the newest checkpoint that all processes have, if any"
    add("--resume", choices=("auto",), default=None, help=text)
    text = "go on from a checkpoint of another number of processes"
    add("--reshard", action="store_true", help=text)
    text = "epochs between checkpoints; the last has one in any case"
    add("--ckpt_epoch_interval", type=at_least(1), default=10, metavar="N", help=text)
    text = "steps between checkpoints besides; 0 for none"
    add("--ckpt_step_interval", type=at_least(0), default=0, metavar="N", help=text)
    text = "epochs between evaluations; the last has one in any case"
    add("--test_epoch_interval", type=at_least(1), default=10, metavar="N", help=text)
    text = "steps between log lines"
    add("--log_step_interval", type=at_least(1), default=20, metavar="N", help=text)
    cli.add_device_option(group)
    cli.add_profile_option(group)
    text = "build nothing, and say what a run would need"
    add("--dry_run", action="store_true", help=text)
    text = "with --dry_run: the largest model of these proportions by devices and their memory"
    add("--largest", action="store_true", help=text)
    text = "with --dry_run: processes of the run (default: those of this job)"
    add("--num_devices", type=at_least(1), default=None, metavar="N", help=text)
    text = "memory of a process's device (default: what this machine has for each process)"
    add("--device_memory", type=positive, default=None, metavar="GiB", help=text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; UserError where options contradict each other."""
    options = build_parser().parse_args(argv)
    if options.image_size % options.patch_size:
        raise UserError(
            f"--image_size {options.image_size} is not a multiple of --patch_size "
            f"{options.patch_size}"
        )
    if options.embed_dim % options.num_heads:
        raise UserError(
            f"--embed_dim {options.embed_dim} is not a multiple of --num_heads {options.num_heads}"
        )
    if shape_of(options).hidden == 0:
        raise UserError(
            f"--mlp_ratio {options.mlp_ratio:g}: the MLPs of --embed_dim {options.embed_dim} have "
            f"no hidden unit; take {1 / options.embed_dim:.2g} or more"
        )
    if options.precision not in _PRECISIONS:
        raise UserError(f"--precision {options.precision}: it is not there; take bfloat16")
    if options.resume_epoch and options.resume:
        raise UserError("--resume_epoch and --resume both say where to go on: give one")
    if options.run_without_fsdp:
        given = {
            "--no_reshard_after_forward": not options.reshard_after_forward,
            "--flatten_parameters": options.flatten_parameters,
            "--prefetch": options.prefetch,
            "--shard_group": options.shard_group is not None,
        }
        wrong = [name for name, asked in given.items() if asked]
        if wrong:
            raise UserError(f"--run_without_fsdp cuts nothing: leave {wrong[0]} out")
    if options.largest and not options.dry_run:
        raise UserError("--largest is for --dry_run")
    if options.num_devices is not None and not options.dry_run:
        raise UserError("--num_devices is for --dry_run; a run has as many as the launcher starts")
    return options


def shape_of(options: argparse.Namespace, num_classes: int | None = None) -> Shape:
    names = ("image_size", "patch_size", "embed_dim", "num_heads", "num_blocks", "mlp_ratio")
    classes = options.num_classes if num_classes is None else num_classes
    return Shape(**{name: getattr(options, name) for name in names}, num_classes=classes)
