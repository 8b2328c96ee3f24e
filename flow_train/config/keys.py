"""The keys of training: of every group what it may hold, its range, and its default, which stands
nowhere else, or is that of a class. `schema.read` checks a group; a program's schema is made of
them, and command lines of the same types (`flags.py`).

With pydantic, this takes 0.2 s to import. The functions that read a group import it, so that who
only calls others, and --help, does without.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from oneflow_accel.precision import PRECISIONS, canonical

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flow_train.config.schema import Group, Text
from flow_train.options import TrainerOptions
from flow_train.sharding import MODES


def _share_or_count(value: float) -> float:
    if isinstance(value, float) and value > 1 and value != int(value):
        raise ValueError(f"{value} is neither a number of global batches nor a share up to 1.0")
    return value


def _ascending(value: list[float]) -> list[float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError(f"{value} must be two positive numbers, the smaller first")
    return value


def _unlimited(value: Any) -> Any:
    # Lightning writes -1 for no limit.
    return None if value == -1 else value


PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
Length = Annotated[Positive | None, BeforeValidator(_unlimited)]
Limit = Annotated[int | float, Field(ge=0), AfterValidator(_share_or_count)]
Sides = Annotated[list[Fraction], Field(min_length=2, max_length=2)]
Range = Annotated[list[Amount], Field(min_length=2, max_length=2), AfterValidator(_ascending)]
Betas = Annotated[list[Below1], Field(min_length=2, max_length=2)]
Channels = Annotated[list[float], Field(min_length=1, max_length=4)]
Strengths = Annotated[list[Amount], Field(min_length=3, max_length=4)]
Fixed = Literal["bicubic", "bilinear", "nearest", "lanczos", "box", "hamming"]
Better = Literal["max", "min"]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]  # what OneFlow's generators take
Precision = Annotated[str, BeforeValidator(canonical)]
_PRECISIONS = (32, 16, "bf16", *PRECISIONS)
ReduceDtype = Literal["float32", "bfloat16"]
Fsdp: TypeAlias = Literal[tuple(MODES)]  # type: ignore[valid-type]
Algorithm = Literal["adamw", "sgd"]
Mixing = Literal["batch", "pair", "elem"]


class Named(Group):
    """A group whose name says which keys it may have. The name is taken in any case, as a class's
    dotted path, with timm's endings and from a `_target_`."""

    # The keys that a name of another program stands for.
    elsewhere: ClassVar[dict[str, Any]] = {}
    # The keys that each name may have; a name that is not here takes all.
    takes: ClassVar[dict[str, Any]] = {}
    name: Any = None

    @model_validator(mode="before")
    @classmethod
    def _settle_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rest = {key: value for key, value in values.items() if key not in ("_target_", "name")}
        name = values.get("name") or values.get("_target_")
        if name is None:
            return rest
        short = str(name).rpartition(".")[2].lower()
        for ending in ("lrscheduler", "schedule"):
            short = short.removesuffix(ending)
        return {**cls.elsewhere.get(short, {"name": short}), **rest}

    @model_validator(mode="after")
    def _check_keys(self) -> Named:
        for key in self.model_fields_set - {"name"}:
            known = self.takes.get(self.name, {key})
            if key not in known and getattr(self, key) is not None:
                raise ValueError(
                    f"{self.name} has no option {key}; it has {', '.join(sorted(known))}"
                )
        return self


class Trainer(Group):
    accelerator: Text | None = Field(None, description="device; null takes the best one there is")
    devices: Positive = Field(1, description="processes of the job, over all nodes")
    min_epochs: Count = Field(1, description="early stopping waits for these")
    max_epochs: Length = Field(None, description="null: no limit but max_steps")
    max_steps: Length = Field(None, description="optimizer steps; null: no limit but max_epochs")
    accumulate_grad_batches: Positive = Field(1, description="batches per optimizer step")
    gradient_clip_val: Above0 | None = Field(
        None, description="largest norm of all gradients together; null: no clipping"
    )
    precision: Literal[_PRECISIONS] = Field(  # type: ignore[valid-type]
        "float32",
        description="; ".join(f"{name}: {text}" for name, text in PRECISIONS.items()),
    )
    reduce_dtype: ReduceDtype = Field(
        "float32", description="what several processes send gradients and add them up in"
    )
    graph: bool = Field(False, description="train under nn.Graph")
    fsdp: Fsdp | None = Field(
        None,
        description="cut parameters, gradients and optimizer over the processes (ZeRO): "
        "full_shard computes blocks again in the backward pass, full_shard_no_recompute keeps "
        "their activations, shard_grad_op their weights too; hybrid_shard is full_shard within "
        "a node and copies across",
    )
    log_every_n_steps: Positive = TrainerOptions.log_every
    check_val_every_n_epoch: Positive = TrainerOptions.check_val_every
    limit_train_batches: Limit | None = Field(
        None,
        description="global batches per epoch, which are optimizer steps: a number, or a share "
        "such as 0.1; null: all",
    )
    limit_val_batches: Limit | None = Field(
        None,
        description="the same of validation and test images, in global batches of training, spread "
        "over the classes",
    )
    fast_dev_run: bool | Count = Field(
        False, description="try out so many batches and stop; true is 1"
    )
    profile: Positive | None = Field(
        None, description="say where the time of so many steps goes, and stop; writes a trace"
    )

    @model_validator(mode="after")
    def _ends(self) -> Trainer:
        if self.profile and (self.graph or self.fast_dev_run):
            raise ValueError("profile is for eager runs: leave graph and fast_dev_run out")
        if self.fsdp and self.graph:
            raise ValueError("fsdp is for eager runs: leave graph out")
        if self.fsdp and canonical(self.precision) == "float16":
            raise ValueError("fsdp is for float32 and bfloat16: take precision=bfloat16")
        if self.reduce_dtype != "float32" and (self.graph or self.fsdp):
            raise ValueError(
                "reduce_dtype is for whole models in eager runs: leave graph, fsdp out"
            )
        endless = self.max_epochs is None and self.max_steps is None
        if endless and not (self.fast_dev_run or self.profile):
            raise ValueError("the run has no end: set trainer.max_epochs or trainer.max_steps")
        return self


class LossFunction(Named):
    elsewhere: ClassVar[dict[str, Any]] = {
        "crossentropy": {"name": "cross_entropy"},
        "crossentropyloss": {"name": "cross_entropy"},
    }
    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Below1 = 0.0


class TrainTransforms(Group):
    auto_augment: Text | None = Field(None, description="RandAugment, as rand-m9-mstd0.5-inc1")
    color_jitter: Amount | Strengths | None = Field(
        None,
        description="strength, or those of brightness, contrast, saturation and hue; not beside "
        "auto_augment",
    )
    interpolation: Fixed | Literal["random"] = "random"
    re_prob: Fraction = Field(0.0, description="probability of random erasing")
    re_mode: Literal["pixel", "rand", "const"] = "pixel"
    re_count: Positive = 1
    scale: Range = Field(default=[0.08, 1.0], description="share of the area that a crop takes")
    ratio: Range = Field(default=[0.75, 4 / 3], description="width to height of a crop")
    hflip: Fraction = Field(0.5, description="probability of a horizontal flip")
    pad: Count | None = Field(None, description="shift by up to so many pixels, and do not crop")
    no_aug: bool | None = Field(None, description="as in evaluation")


class EvalTransforms(Group):
    interpolation: Fixed = "bicubic"
    resize_size: Positive | None = Field(None, description="of the shorter side, before cropping")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = Field(
        0.875, description="image_size over the size that the shorter side is reduced to"
    )


class Mixup(Group):
    mixup_alpha: Amount = 0.0
    cutmix_alpha: Amount = 0.0
    cutmix_minmax: Sides | None = Field(
        None, description="least and largest side of the box, as a share of the image's"
    )
    prob: Fraction = 1.0
    switch_prob: Fraction = Field(0.5, description="probability of cutmix where both are on")
    mode: Mixing = "batch"
    correct_lam: bool = Field(True, description="shares by the part of the box inside the image")
    label_smoothing: Below1 = 0.0
    num_classes: Positive | None = Field(None, description="null: as many as the data has")

    @model_validator(mode="before")
    @classmethod
    def _no_target(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key != "_target_"}

    @model_validator(mode="after")
    def _check_sides(self) -> Mixup:
        sides = self.cutmix_minmax
        if sides is not None and sides[0] >= sides[1]:
            raise ValueError(f"cutmix_minmax is {sides}; the smaller share comes first")
        return self


class Datamodule(Group):
    dataset: Literal["folder", "mnist", "synthetic"] = Field(
        "folder", description="folder: DIR/train/CLASS/IMAGE and DIR/val/CLASS/IMAGE"
    )
    data_dir: PathText | None = Field(
        None, description="where the images are; $DATA_DIR without it"
    )
    image_size: Positive = 224
    batch_size: Positive = Field(32, description="training images per process and batch")
    batch_size_eval: Positive | None = Field(
        None, description="the same for validation and test; null: batch_size"
    )
    num_workers: Count = Field(0, description="processes that read images, per training process")
    shuffle: bool = True
    pin_memory: bool = False
    drop_last: bool = True
    num_aug_repeats: Count = Field(0, description="repeated augmentation; 0: none")
    cache_val_dataset: bool = Field(False, description="keep the validation images in memory")
    val_split: Amount | None = Field(
        None, description="validation images to hold out, or a share; null: as the data has it"
    )
    num_images: Positive = Field(1024, description="of synthetic training images")
    num_classes: Positive | None = Field(None, description="null: as many as the data has")
    class_map: PathText | None = Field(
        None, description="a file with all classes of a model, for folders of a part of them"
    )
    allow_empty: bool = Field(False, description="class folders may be empty")
    mean: Channels | None = Field(None, description="per channel, 0 to 1; null: the usual one")
    std: Channels | None = None
    train_transforms: TrainTransforms | None = None
    val_transforms: EvalTransforms | None = None
    test_transforms: EvalTransforms | None = Field(None, description="null: val_transforms")
    mixup: Mixup | None = Field(None, description="null: none; never in validation or test")


class Optimizer(Named):
    """timm's "momentum" and "nesterov" are SGD without and with Nesterov's momentum."""

    elsewhere: ClassVar[dict[str, Any]] = {
        "momentum": {"name": "sgd", "nesterov": False},
        "nesterov": {"name": "sgd", "nesterov": True},
    }
    takes: ClassVar[dict[str, Any]] = {
        "adamw": {"lr", "weight_decay", "betas", "eps", "amsgrad"},
        "sgd": {"lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"},
    }
    name: Algorithm = "adamw"
    lr: Amount
    weight_decay: Amount = 0.0
    betas: Betas | None = Field(None, description="adamw; null: 0.9 and 0.999")
    eps: Above0 | None = Field(None, description="adamw; null: 1e-8")
    amsgrad: bool | None = Field(None, description="adamw: divide by the largest second moment")
    momentum: Amount | None = Field(None, description="sgd")
    dampening: Amount | None = Field(None, description="sgd: less of the gradient in the momentum")
    nesterov: bool | None = Field(None, description="sgd: Nesterov's momentum")
    maximize: bool | None = Field(None, description="sgd: go up instead of down")

    @model_validator(mode="after")
    def _check_nesterov(self) -> Optimizer:
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self


class ParameterGrouping(Group):
    bias_weight_decay: bool = False
    normalization_weight_decay: bool = False


class Scheduler(Named):
    """Times are in epochs, or in optimizer steps where train.scheduler_interval is `step`. Other
    schedules take the cosine's keys too and ignore them: experiments set them, and compute their
    epochs from them. The same goes for timm's `t_in_epochs` and `initialize`."""

    elsewhere: ClassVar[dict[str, Any]] = {"timmcosine": {"name": "cosine"}}
    name: Literal["cosine", "linear", "constant"] = "cosine"
    t_initial: Above0 | None = Field(
        None, description="length of the cosine, without the cool-down"
    )
    t_total: Above0 | None = Field(None, description="length of the linear schedule")
    lr_min: Amount = Field(0.0, description="learning rate at the end and in the cool-down")
    warmup_t: Amount = 0.0
    warmup_lr_init: Amount = 0.0
    warmup_prefix: bool = Field(False, description="the cosine starts after the warm-up")
    cycle_limit: Positive = 1
    cycle_mul: Annotated[float, Field(ge=1)] = 1.0
    cycle_decay: Amount = 1.0
    k_decay: Above0 = 1.0
    cooldown: Amount = Field(0.0, description="time at lr_min after the end")
    t_in_epochs: bool | None = None
    initialize: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _check_length(self) -> Scheduler:
        needed = {"cosine": "t_initial", "linear": "t_total"}.get(self.name)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"{needed} is missing: the {self.name} schedule needs it")
        if self.name == "linear" and (self.t_total or 0) <= self.warmup_t:
            raise ValueError(f"t_total is {self.t_total}; it must be above warmup_t")
        return self


class Ema(Group):
    decay: Below1
    use_num_updates: bool = False


class ModelCheckpoint(Group):
    monitor: Text = "val/acc"
    mode: Better = "max"
    save_top_k: Count = 1
    save_last: bool = True
    every_n_train_steps: Count = Field(0, description="besides, every so many steps; 0: not")
    every_n_epochs: Positive = Field(1, description="how often `save_last` writes one")


class EarlyStopping(Group):
    monitor: Text = "val/acc"
    mode: Better = "max"
    patience: Positive = Field(100, description="validations without a better value")
    min_delta: Amount = 0.0
    max_minutes: Amount | None = Field(None, description="or at the first one after so many")


class LearningRateMonitor(Group):
    logging_interval: Literal["step", "epoch"] = "step"


class SpeedMonitor(Group):
    intra_step_time: bool = True
    inter_step_time: bool = True
    epoch_time: bool = True
    verbose: bool = False


class ParamsLog(Group):
    total_params_log: bool = True
    trainable_params_log: bool = True
    non_trainable_params_log: bool = True


class NoOptions(Group):
    """On as {}, off as null."""


class NormMonitor(Group):
    layer_norm_only: bool = False


class Callbacks(Group):
    model_checkpoint: ModelCheckpoint | None = None
    early_stopping: EarlyStopping | None = None
    learning_rate_monitor: LearningRateMonitor | None = None
    speed_monitor: SpeedMonitor | None = None
    params_log: ParamsLog | None = None
    macs: NoOptions | None = Field(None, description="count multiply-accumulates (MACs) per image")
    initial_validation: NoOptions | None = Field(None, description="validate before the first step")
    norm_monitor: NormMonitor | None = Field(None, description="norms of weights and gradients")
    ema: Ema | None = Field(None, description="moving average of the weights")


class Wandb(Group):
    project: Text = "monarch_flow"
    name: Text | None = None
    id: Text | None = None
    mode: Literal["online", "offline", "disabled"] = "offline"
    group: Text | None = None
    tags: list[Text] = Field(default_factory=list)


class Logger(Group):
    """metrics.jsonl is written in any case."""

    tensorboard: NoOptions | None = None
    csv: NoOptions | None = None
    wandb: Wandb | None = Field(None, description="Weights & Biases; must be installed")
