"""The command line of main.py: one place that names every option, its default and its limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from oneflow_accel.errors import did_you_mean
from oneflow_accel.precision import PRECISIONS

from pydantic import AfterValidator, Field, model_validator

from flow_train import cli
from flow_train.config import keys
from flow_train.config.flags import Flags, flag
from flow_train.data.rand_augment import parse_rand_augment
from monarch_flow.config import Layers
from monarch_flow.layers import LinearConfig
from resnet50_imagenet.models import classification_models, image_size_of

DATA_VARIABLE = "IMAGENET_DIR"
DEFAULT_DATA = "/ssd/dataset/ImageNet/extract"
LAUNCH = (
    "Either launch with `python3 -m oneflow.distributed.launch --nproc_per_node N main.py "
    "--multiprocessing-distributed`, or call main.py with that flag and it launches one "
    "process for each device of this node."
)


def _known(arch: str) -> str:
    names = classification_models()
    if arch not in names:
        hint = did_you_mean(arch, names, "--help lists them", most=3)
        raise ValueError(f"there is no model {arch}; {hint}")
    return arch


class Options(Flags):
    """`_settle` gives folders and an image size, the session a seed, where these are not given."""

    data: str = flag(
        None,
        "DIR",
        "folder with train/CLASS/*.jpg and val/CLASS/*.jpg "
        f"(default: ${DATA_VARIABLE}, else {DEFAULT_DATA})",
        names="data",
    )

    arch: Annotated[str, AfterValidator(_known)] = flag(
        "resnet50", "ARCH", "model; all names stand below", names="-a --arch", group=("model",)
    )
    weights: Path | None = flag(None, "FILE")
    "start from these weights: .pth (torch, zip or legacy), .safetensors, or the folder of a run"
    pretrained: bool = flag(False)
    "start from the weights file of this model in $ONEFLOW_ACCEL_WEIGHTS"
    reset_head: bool = flag(False)
    "leave out the classifier's weights, to fine-tune on other classes"
    conv_cfg: Layers | None = flag(None, "LAYER")
    """monarch, blockdiag, {_target_: monarch, nblocks: 2}, ...: structured convolutions in place of
    all but the first, the nearest to those of --weights or --pretrained (default: dense)"""
    channels_last: bool = flag(False, text="train in NHWC instead of NCHW")
    freeze_bn: bool = flag(False)
    "keep the running statistics of batch normalization as they are"

    epochs: keys.Count = flag(90, "N", "epochs to run", group=("training",))
    start_epoch: keys.Count = flag(0, "N", "epoch to start at")
    max_steps: keys.Positive | None = flag(None, "N", "stop after this many steps in all")
    batch_size: keys.Positive = flag(192, "N", names="-b --batch-size")
    "images per step of all processes of this node together"
    lr: keys.Amount = flag(0.1, "LR", names="--lr --learning-rate")
    "initial learning rate"
    scheduler: Literal["step", "cosine", "linear", "constant"] = flag("step")
    "step divides the rate by 10 every 30 epochs; cosine and linear take it to 0 over --epochs"
    optimizer: keys.Algorithm = flag("sgd")
    "sgd decays all weights, adamw neither biases nor scales of normalization"
    momentum: keys.Amount = flag(0.9, "M", "momentum of SGD")
    weight_decay: keys.Amount = flag(1e-4, "W", "weight decay", names="--wd --weight-decay")
    grad_accum_steps: keys.Positive = flag(1, "N", "batches whose gradients one step adds up")
    clip_grad: keys.Above0 | None = flag(None, "NORM")
    "scale gradients down to this norm of all together"
    smoothing: keys.Fraction = flag(0.0, "S", "label smoothing")
    model_ema: bool = flag(False, text="keep a moving average of the weights, and validate that")
    model_ema_decay: keys.Fraction = flag(0.9998, "D", "decay of the average")
    graph: bool = flag(False, text="train or evaluate under nn.Graph, not eagerly")
    precision: keys.Precision = flag(
        "float32",
        "NAME",
        "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items()),
        names="--precision --dtype",
    )
    amp: bool = flag(False, text="the same as --precision float16", exclude=True)
    reduce_dtype: keys.ReduceDtype = flag("float32")
    "what several processes send gradients and add them up in: float32 or bfloat16"
    fsdp: keys.Fsdp | None = flag(None, "MODE", bare=True)
    """cut parameters, gradients and optimizer over the processes, and compute blocks again in the
    backward pass (full_shard) or keep their activations, or their weights too; hybrid_shard cuts
    within a node; no MODE is full_shard"""
    seed: keys.Seed = flag(None, "N", "seed of everything random; drawn if absent")

    workers: keys.Count = flag(4, "N", names="-j --workers", group=("data",))
    "processes that load images, per training process; 0 loads in the process itself"
    image_size: Annotated[int, Field(ge=8)] = flag(None, "N")
    "pixels a side (default: those the model was made for, 224 for most)"
    scale: tuple[keys.Fraction, keys.Fraction] = flag((0.08, 1.0), ("MIN", "MAX"))
    "share of a training image's area that a random crop takes"
    hflip: keys.Fraction = flag(0.5, "P", "how often a training image is mirrored")
    aa: str | None = flag(None, "POLICY")
    "RandAugment, such as rand-m9-mstd0.5-inc1 (timm's grammar)"
    reprob: keys.Fraction = flag(0.0, "P", "how often a box is erased")
    mixup: keys.Amount = flag(0.0, "ALPHA", "alpha of mixup; 0 is off")
    cutmix: keys.Amount = flag(0.0, "ALPHA", "alpha of CutMix; 0 is off")
    mixup_prob: keys.Fraction = flag(
        1.0, "P", "how often a batch is mixed where mixup or CutMix is on"
    )
    mixup_switch_prob: keys.Fraction = flag(0.5, "P", "how often it is CutMix where both are on")
    mixup_mode: keys.Mixing = flag("batch")
    "what is drawn for: the whole batch, two images, or each"
    dummy: bool = flag(False, text="random images of the real shape, no disk")

    device: str | None = flag(None, "NAME", cli.DEVICE, group=("run",))
    evaluate: bool = flag(False, names="-e --evaluate")
    "only evaluate on the validation images"
    predictions: Path | None = flag(None, "FILE.csv")
    "with --evaluate: write each image's label and five likeliest classes"
    benchmark: Literal["this", "all"] | None = flag(None, "all", bare=True)
    """only measure the forward pass under nn.Graph: images/s, TFLOP/s, share of the peak; all: in
    each layout and precision"""
    profile: keys.Positive | None = flag(None, "STEPS", cli.PROFILE)
    fold: bool = flag(True)
    """with --evaluate or --benchmark: batch norm folded into the convolutions, which is faster and
    differs by rounding"""
    bf16: bool = flag(False, text="the same as --precision bfloat16", exclude=True)
    output_dir: Path = flag(None, "DIR", "checkpoints, metrics, curves (default: runs/ARCH)")
    resume: str | None = flag(None, "PATH")
    "continue from this checkpoint; 'auto': from the newest in the output folder, if any"
    save_freq: keys.Positive = flag(1000, "N")
    "steps between checkpoints; one is written at the end of each epoch as well"
    print_freq: keys.Positive = flag(10, "N", names="-p --print-freq")
    "steps between log lines; only there the device is waited for"

    multiprocessing_distributed: bool = flag(False, group=("several processes", LAUNCH))
    "data parallel, one process for each device"
    world_size: keys.Positive = flag(1, "N", "number of nodes")
    rank: keys.Count = flag(0, "N", "number of this node")
    dist_url: str = flag("tcp://127.0.0.1:29500", "URL")
    "where node 0 is reached, tcp://HOST:PORT"
    dist_backend: str | None = flag(None, "NAME")
    "collective library; only the device's own can be used"
    gpu: keys.Count | None = flag(None, "N", "use this device and no data parallelism")

    @model_validator(mode="after")
    def _settle(self) -> Options:
        asked = {"--amp": "float16", "--bf16": "bfloat16", "--precision": self.precision}
        given = {name: asked[name] for name in asked if name[2:] in self.model_fields_set}
        if len(set(given.values())) > 1:
            raise ValueError(f"{' and '.join(given)} ask for different precisions: give one")
        self.precision = next(iter(given.values()), self.precision)
        for wrong, text in self._contradictions():
            if wrong:
                raise ValueError(text)
        self.data = self.data or os.environ.get(DATA_VARIABLE, DEFAULT_DATA)
        LinearConfig.of(self.conv_cfg)
        if self.aa:
            parse_rand_augment(self.aa)
        self.image_size = self.image_size or image_size_of(self.arch)
        self.output_dir = self.output_dir or Path("runs") / self.arch
        return self

    def _contradictions(self) -> Iterator[tuple[Any, str]]:
        """What must not be, and what to say of it."""
        given, low, high = self.weights is not None, *self.scale
        infers = self.evaluate or self.benchmark
        yield given and self.pretrained, "--weights and --pretrained both name weights: give one"
        text = "--reset-head is for weights to start from: add --weights or --pretrained"
        yield self.reset_head and not given and not self.pretrained, text
        text = "--reset-head and --evaluate: a new head has nothing to evaluate"
        yield self.reset_head and self.evaluate, text
        text = "--predictions is for -e: add that"
        yield self.predictions is not None and not self.evaluate, text
        text = "--momentum is for --optimizer sgd: leave it out"
        yield "momentum" in self.model_fields_set and self.optimizer != "sgd", text
        yield self.smoothing == 1, "--smoothing 1 leaves nothing of the labels: give less"
        text = "--model-ema-decay is for a moving average: add --model-ema"
        yield "model_ema_decay" in self.model_fields_set and not self.model_ema, text
        text = "--profile is for eager training: leave --graph, --evaluate and --benchmark out"
        yield self.profile and (self.graph or infers), text
        text = "--fsdp is for eager training in NCHW: leave --graph, --channels-last out"
        yield self.fsdp and (self.graph or self.channels_last), text
        text = "--fsdp trains in float32 or bfloat16: take --precision bfloat16"
        yield self.fsdp and self.precision == "float16", text
        text = f"--precision {self.precision} is for training: take bfloat16"
        yield infers and self.precision not in ("float32", "bfloat16"), text
        text = "inference in bfloat16 folds batch norms as well: leave --no-fold out"
        both = self.precision == "bfloat16" or self.benchmark == "all"
        yield infers and not self.fold and both, text
        text = "--reduce-dtype is for eager training of whole models: leave --graph, --fsdp out"
        yield self.reduce_dtype != "float32" and (self.graph or self.fsdp), text
        text = "--gpu takes one device, --multiprocessing-distributed all: give one"
        yield self.gpu is not None and self.multiprocessing_distributed, text
        yield low > high or high == 0, f"--scale {low} {high}: MIN MAX, MAX above 0"


def build_parser() -> cli.Parser:
    """The parser, with the options of the reference ImageNet script and the new ones."""
    parser = cli.Parser(
        prog="main.py",
        description="Train or evaluate an image classifier on ImageNet with OneFlow.",
        epilog="models: " + " ".join(classification_models()),
    )
    Options.add_to(parser)
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Parse and check the command line; UserError where options contradict each other."""
    return Options.parse(build_parser(), argv)
