"""The options of `run_vit_training.py`: one place for names, defaults and checks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from oneflow_accel.errors import UserError
from oneflow_accel.precision import PRECISIONS

from pydantic import model_validator

from flow_train import cli
from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Above0, Amount, Count, Fraction, Positive, Precision, Seed
from monarch_flow.config import Layers
from vit_10b.model import Shape

# float16 needs a scaled loss.
_PRECISIONS = [name for name in PRECISIONS if name != "float16"]
_SHAPE = Shape()
# Of structured layers.
LAYERS = ("mlp_cfg", "attnlinear_cfg", "attnproj_cfg")


class Options(Flags):
    """The seed may be None until the session gives it."""

    joint: ClassVar[str] = "_"

    data_dir: Path = flag(Path("/datasets/imagenet-1k"), "DIR", group=("data",))
    "folder with train/CLASS/*.jpg and val/CLASS/*.jpg"
    fake_data: bool = flag(False)
    "black images of class 0, as many as ImageNet has; no disk"
    num_workers: Count = flag(4, "N", "processes that load images, per training process")

    image_size: Positive = flag(_SHAPE.image_size, "N", "pixels a side", group=("model",))
    patch_size: Positive = flag(_SHAPE.patch_size, "N")
    "pixels a side of a patch; divides the image"
    embed_dim: Positive = flag(_SHAPE.embed_dim, "N", "width of a token")
    num_heads: Positive = flag(_SHAPE.num_heads, "N", "attention heads; divide the width")
    num_blocks: Positive = flag(_SHAPE.num_blocks, "N", "transformer blocks")
    num_classes: Positive = flag(_SHAPE.num_classes, "N")
    "classes of --fake_data; a data folder has its own"
    mlp_ratio: Above0 = flag(_SHAPE.mlp_ratio, "R", "hidden width of an MLP over that of a token")
    mlp_cfg: Layers | None = flag(None, "LAYER")
    "monarch, blockdiag or {_target_: monarch, nblocks: 8} in the MLPs (default: dense)"
    attnlinear_cfg: Layers | None = flag(None, "LAYER", "the same of queries, keys and values")
    attnproj_cfg: Layers | None = flag(None, "LAYER", "the same after attention")
    pos_dropout: Fraction = flag(0.0, "P", "dropout after the position embedding")
    att_dropout: Fraction = flag(0.0, "P", "dropout of attention weights")
    mlp_dropout: Fraction = flag(0.0, "P", "dropout in the MLPs and after attention")
    init: Literal["framework", "timm"] = flag("framework")
    """first weights of the linear layers: as the framework's constructors draw them, which is what
    the published code does, or normal with deviation 0.02, which it means to do"""

    batch_size: Positive = flag(1024, "N", group=("training",))
    "images per step of all processes together"
    num_epochs: Positive = flag(300, "N", "epochs of the run")
    max_steps: Positive | None = flag(None, "N")
    "stop after this many steps in all; the schedule is still that of --num_epochs"
    lr: Amount = flag(1e-3, "LR", "learning rate of AdamW")
    weight_decay: Amount = flag(0.1, "W", "weight decay, of every parameter")
    sparse_to_dense: Fraction | None = flag(None, "X")
    "make structured layers dense after this share (0 to 1) of the epochs; training goes on"
    clip_grad_norm: float = flag(1.0, "NORM")
    "largest norm of all gradients together; 0 or less: no clipping"
    warmup_steps: Count = flag(10000, "N", "steps in which the learning rate rises from 0")
    seed: Seed | None = flag(None, "N", "seed of everything random; drawn if absent")

    grad_ckpt: bool = flag(True, names="--no_grad_ckpt", group=("sharding",))
    """keep the activations of each block instead of computing them again in the backward pass
    (activation checkpointing)"""
    reshard_after_forward: bool = flag(True, names="--no_reshard_after_forward")
    "keep the gathered weights until the backward pass (ZeRO stage 2)"
    flatten_parameters: bool = flag(False, text="one shard per block, not one per tensor")
    run_without_fsdp: bool = flag(False)
    "the whole model in each process, and gradients averaged"
    shard_on_cpu: bool = flag(False)
    "no meaning here: every block is made and cut in host memory before the next is made"
    mark_step_after_forward: bool = flag(False)
    "no meaning here: there is no lazy graph to cut"
    shard_group: Positive | None = flag(None, "N")
    "cut over groups of N neighbouring processes, with copies across them (default: all)"
    shard_multiple: Positive = flag(1, "N", "pad shards to a multiple of N numbers")
    prefetch: bool = flag(False)
    "gather the next block while one runs; takes the memory of a block"
    precision: Precision = flag(
        "float32",
        "NAME",
        f"what is computed in: {', '.join(_PRECISIONS)}; weights stay float32",
        names="--precision --dtype --compute_dtype",
    )
    gather_dtype: Literal["float32", "float16", "bfloat16"] = flag("float32")
    "what shards are sent as; they stay float32"

    ckpt_dir: Path = flag(Path(tempfile.gettempdir()) / "vit_fsdp", "DIR", group=("run",))
    "checkpoints, metrics and curves; hosts may have a folder of their own each"
    resume_epoch: Count = flag(0, "N")
    "go on after epoch N from its checkpoint; 0 begins a run"
    resume: Literal["auto"] | None = flag(None)
    "'auto': go on from the newest checkpoint that all processes have, if any"
    reshard: bool = flag(False, text="go on from a checkpoint of another number of processes")
    ckpt_epoch_interval: Positive = flag(10, "N")
    "epochs between checkpoints; the last has one in any case"
    ckpt_step_interval: Count = flag(0, "N", "steps between checkpoints besides; 0 for none")
    test_epoch_interval: Positive = flag(10, "N")
    "epochs between evaluations; the last has one in any case"
    log_step_interval: Positive = flag(20, "N", "steps between log lines")
    device: str | None = flag(None, "NAME", cli.DEVICE)
    profile: Positive | None = flag(None, "STEPS", cli.PROFILE)
    dry_run: bool = flag(False, text="build nothing, and say what a run would need")
    largest: bool = flag(False)
    "with --dry_run: the largest model of these proportions by devices and their memory"
    num_devices: Positive | None = flag(None, "N")
    "with --dry_run: processes of the run (default: those of this job)"
    device_memory: Above0 | None = flag(None, "GiB")
    "memory of a process's device (default: what this machine has for each process)"

    @model_validator(mode="after")
    def _check(self) -> Options:
        dim, heads, size, patch = self.embed_dim, self.num_heads, self.image_size, self.patch_size
        if size % patch:
            raise ValueError(f"--image_size {size} is not a multiple of --patch_size {patch}")
        if dim % heads:
            raise ValueError(f"--embed_dim {dim} is not a multiple of --num_heads {heads}")
        if shape_of(self).hidden == 0:
            raise ValueError(
                f"--mlp_ratio {self.mlp_ratio:g}: the MLPs of --embed_dim {dim} have no hidden "
                f"unit; take {1 / dim:.2g} or more"
            )
        for name in LAYERS:
            try:
                _ = Shape(**{name: getattr(self, name)}).parameters
            except UserError as error:
                raise ValueError(f"--{name}: {error}") from error
        if self.sparse_to_dense is not None and not any(getattr(self, name) for name in LAYERS):
            keys = ", ".join(f"--{name}" for name in LAYERS)
            raise ValueError(f"--sparse_to_dense: all layers are dense; give one of {keys}")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"--precision {self.precision}: it is not there; take bfloat16")
        if self.resume_epoch and self.resume:
            raise ValueError("--resume_epoch and --resume both say where to go on: give one")
        cuts = {
            "--no_reshard_after_forward": not self.reshard_after_forward,
            "--flatten_parameters": self.flatten_parameters,
            "--prefetch": self.prefetch,
            "--shard_group": self.shard_group is not None,
        }
        wrong = [name for name, asked in cuts.items() if asked]
        if self.run_without_fsdp and wrong:
            raise ValueError(f"--run_without_fsdp cuts nothing: leave {wrong[0]} out")
        if self.largest and not self.dry_run:
            raise ValueError("--largest is for --dry_run")
        if self.num_devices is not None and not self.dry_run:
            raise ValueError(
                "--num_devices is for --dry_run; a run has as many as the launcher starts"
            )
        return self


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="run_vit_training.py",
        description="Train a vision transformer whose parameters, gradients and optimizer are cut "
        "over the processes. The defaults are a model of 10 billion parameters.",
    )
    Options.add_to(parser)
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Parse and check the command line; UserError where options contradict each other."""
    return Options.parse(build_parser(), argv)


def shape_of(options: Options, num_classes: int | None = None) -> Shape:
    names = ("image_size", "patch_size", "embed_dim", "num_heads", "num_blocks", "mlp_ratio")
    classes = options.num_classes if num_classes is None else num_classes
    return Shape(
        **{name: getattr(options, name) for name in (*names, *LAYERS)}, num_classes=classes
    )
