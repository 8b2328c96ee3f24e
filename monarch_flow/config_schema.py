"""Every key of a training run with its type, its range and what it means.

The values are in configs/*.yaml. A key that no file and no override sets has the default given
here; a key without one has to be set.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from flow_train.config.schema import Group, Schema, Text


def _resume(value: Any) -> Any:
    return {"True": "auto", "False": None}.get(str(value), value)


PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
Resume = Annotated[PathText | None, BeforeValidator(_resume)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[float, Field(gt=0)]
# A mapping with a `_target_`, which monarch_flow.layers checks, or one of its short names.
Layers = dict[str, Any] | str
Limit = Annotated[int | float, Field(ge=0)]
Range = Annotated[list[Amount], Field(min_length=2, max_length=2)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
Channels = Annotated[list[float], Field(min_length=1, max_length=4)]
# Of the three stages of a ViTAE.
Widths = Annotated[list[Positive], Field(min_length=3, max_length=3)]
Interpolation = Literal["bicubic", "bilinear", "nearest", "lanczos", "random"]
Better = Literal["max", "min"]


class Evaluation(Group):
    ckpt: PathText | None = Field(description="evaluate this checkpoint and do not train")
    run_val: bool = Field(description="evaluate on the validation images")
    run_test: bool = Field(description="evaluate on the test images")
    use_ema: bool = Field(
        description="of a checkpoint with both, the weights' moving averages; false: the last ones"
    )
    real_labels: PathText | None = Field(
        description="real.json, to count by ImageNet's reassessed labels too"
    )
    results_file: PathText | None = Field(description="write the figures to this file, as JSON")


class TrainerGroup(Group):
    accelerator: Text | None = Field(description="device; null takes the best one there is")
    devices: Positive = Field(description="processes of the job, over all nodes")
    min_epochs: Count = Field(description="early stopping waits for these")
    max_epochs: Positive | None = Field(description="null: no limit but max_steps")
    max_steps: Positive | None = Field(description="optimizer steps; null: no limit but max_epochs")
    accumulate_grad_batches: Positive = Field(description="batches per optimizer step")
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = Field(
        description="largest norm of all gradients together; null: no clipping"
    )
    precision: Literal[32, 16, "bf16"] = Field(description="32, or 16 or bf16 for mixed precision")
    graph: bool = Field(description="train under nn.Graph")
    log_every_n_steps: Positive
    check_val_every_n_epoch: Positive
    limit_train_batches: Limit | None = Field(
        description="global batches per epoch, which are optimizer steps: a number, or a share "
        "such as 0.1; null: all"
    )
    limit_val_batches: Limit | None = Field(
        description="the same of validation and test images, in global batches of training, spread "
        "over the classes"
    )
    fast_dev_run: bool | Count = Field(description="try out so many batches and stop; true is 1")


class SparseToDense(Group):
    fraction: Fraction | None = Field(
        description="share of the epochs after which structured layers become dense; null: never"
    )


class InitFrom(Group):
    path: PathText | None = Field(description="start with this checkpoint's weights")
    project: bool = Field(description="project its dense weights onto the structured layers")
    use_ema: bool = Field(description="take their moving averages where it has them")
    reset_head: bool = Field(description="leave out its classifier, to train on other classes")


class LossFunction(Group):
    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Train(Group):
    global_batch_size: Positive = Field(description="images per optimizer step, all processes")
    lr_base: Annotated[float, Field(gt=0)] | None = Field(
        None, description="learning rate for lr_base_size images per step; optimizer.lr follows"
    )
    lr_base_size: Positive = Field(512, description="images that lr_base is for")
    loss_fn: LossFunction
    loss_fn_val: LossFunction
    scheduler_interval: Literal["epoch", "step"] = Field(
        description="the scheduler's unit of time, and when the learning rate moves"
    )
    sparse_to_dense: SparseToDense
    init_from: InitFrom


class TrainTransforms(Group):
    auto_augment: Text | None = Field(None, description="RandAugment, as rand-m9-mstd0.5-inc1")
    color_jitter: Amount | None = Field(None, description="strength; not beside auto_augment")
    interpolation: Interpolation = "random"
    re_prob: Fraction = Field(0.0, description="probability of random erasing")
    re_mode: Literal["pixel", "rand", "const"] = "pixel"
    re_count: Positive = 1
    scale: Range = Field(default=[0.08, 1.0], description="share of the area that a crop takes")
    ratio: Range = Field(default=[0.75, 4 / 3], description="width to height of a crop")
    hflip: Fraction = Field(0.5, description="probability of a horizontal flip")
    pad: Count | None = Field(None, description="shift by up to so many pixels, and do not crop")
    no_aug: bool | None = Field(None, description="as in evaluation")


class EvalTransforms(Group):
    interpolation: Interpolation = "bicubic"
    resize_size: Positive | None = Field(None, description="of the shorter side, before cropping")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = Field(
        0.875, description="image_size over the size that the shorter side is reduced to"
    )


class Mixup(Group):
    mixup_alpha: Amount = 0.0
    cutmix_alpha: Amount = 0.0
    prob: Fraction = 1.0
    switch_prob: Fraction = Field(0.5, description="probability of cutmix where both are on")
    mode: Literal["batch", "pair", "elem"] = "batch"
    correct_lam: bool = Field(True, description="shares by the part of the box inside the image")
    cutmix_minmax: Range | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Datamodule(Group):
    dataset: Literal["folder", "mnist", "synthetic"] = Field(
        description="folder: DIR/train/CLASS/IMAGE and DIR/val/CLASS/IMAGE"
    )
    data_dir: PathText | None = Field(description="where the images are; $DATA_DIR without it")
    image_size: Positive
    batch_size: Positive = Field(description="training images per process and batch")
    batch_size_eval: Positive = Field(description="the same for validation and test")
    num_workers: Count = Field(description="processes that read images, per training process")
    shuffle: bool
    pin_memory: bool
    drop_last: bool
    num_aug_repeats: Count = Field(description="repeated augmentation; 0: none")
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
    train_transforms: TrainTransforms
    val_transforms: EvalTransforms
    test_transforms: EvalTransforms
    mixup: Mixup | None = Field(description="null: none; never in validation or test")


class Model(Group):
    """Which of these a model takes is the model's to say; those that are set go to create_model."""

    name: Text = Field(description="a model of monarch_flow.models")
    num_classes: Positive | None = Field(None, description="null: as many as the data has")
    img_size: Positive | None = None
    in_chans: Positive | None = None
    patch_size: Positive | None = None
    embed_dim: Positive | None = None
    embed_dims: Widths | None = None
    token_dims: Widths | None = None
    conv_groups: Positive | None = None
    depth: Positive | None = None
    num_heads: Positive | None = None
    mlp_ratio: Annotated[float, Field(gt=0)] | None = None
    token_ratio: Annotated[float, Field(gt=0)] | None = None
    channel_ratio: Annotated[float, Field(gt=0)] | None = None
    qkv_bias: bool | None = None
    tokens_type: Literal["performer", "transformer"] | None = None
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    attn_drop_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    drop_path_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    mlp_cfg: Layers | None = Field(
        None, description="layers of the MLPs, in a mixer of those over channels; null: dense"
    )
    token_mlp_cfg: Layers | None = Field(None, description="the same of a mixer's MLPs over tokens")
    attnlinear_cfg: Layers | None = Field(None, description="layer of the projections to q, k, v")


class Optimizer(Group):
    """Which of these an optimizer takes is the optimizer's to say; those that are set go to it."""

    name: Literal["adamw", "sgd"]
    lr: Annotated[float, Field(gt=0)]
    weight_decay: Amount
    betas: Betas | None = None
    eps: Annotated[float, Field(gt=0)] | None = None
    momentum: Amount | None = None
    nesterov: bool | None = None


class ParameterGrouping(Group):
    bias_weight_decay: bool
    normalization_weight_decay: bool


class Scheduler(Group):
    """Which of these a schedule takes is the schedule's to say; those that are set go to it.

    Times are in epochs, or in optimizer steps where train.scheduler_interval is `step`.
    """

    name: Literal["cosine", "linear", "constant"]
    t_initial: Time | None = Field(None, description="length of the cosine, without the cool-down")
    t_total: Time | None = Field(None, description="length of the linear schedule")
    lr_min: Amount | None = Field(None, description="learning rate at the end and in the cool-down")
    warmup_t: Amount | None = None
    warmup_lr_init: Amount | None = None
    warmup_prefix: bool | None = Field(None, description="the cosine starts after the warm-up")
    cycle_limit: Positive | None = None
    cycle_mul: Annotated[float, Field(ge=1)] | None = None
    cycle_decay: Amount | None = None
    k_decay: Annotated[float, Field(gt=0)] | None = None
    cooldown: Amount | None = Field(None, description="time at lr_min after the end")


class Ema(Group):
    decay: Annotated[float, Field(ge=0, lt=1)]
    use_num_updates: bool = False


class ModelCheckpoint(Group):
    monitor: Text = "val/acc"
    mode: Better = "max"
    save_top_k: Count = 1
    save_last: bool = True
    every_n_train_steps: Count = Field(0, description="besides, every so many steps; 0: not")


class EarlyStopping(Group):
    monitor: Text = "val/acc"
    mode: Better = "max"
    patience: Positive = Field(100, description="validations without a better value")
    min_delta: Amount = 0.0


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


class Macs(Group):
    pass


class InitialValidation(Group):
    pass


class NormMonitor(Group):
    layer_norm_only: bool = False


class Callbacks(Group):
    model_checkpoint: ModelCheckpoint | None = None
    early_stopping: EarlyStopping | None = None
    learning_rate_monitor: LearningRateMonitor | None = None
    speed_monitor: SpeedMonitor | None = None
    params_log: ParamsLog | None = None
    macs: Macs | None = Field(None, description="count multiply-accumulates (MACs) per image")
    initial_validation: InitialValidation | None = Field(
        None, description="validate before the first step"
    )
    norm_monitor: NormMonitor | None = Field(None, description="norms of weights and gradients")
    ema: Ema | None = Field(None, description="moving average of the weights")


class Csv(Group):
    pass


class TensorBoard(Group):
    pass


class Wandb(Group):
    project: Text = "monarch_flow"
    name: Text | None = None
    id: Text | None = None
    mode: Literal["online", "offline", "disabled"] = "offline"
    group: Text | None = None
    tags: list[Text] = Field(default_factory=list)


class Logger(Group):
    """metrics.jsonl is written in any case."""

    tensorboard: TensorBoard | None = None
    csv: Csv | None = None
    wandb: Wandb | None = Field(None, description="Weights & Biases; has to be installed")


class Config(Group):
    seed: Count | None = Field(description="of every random generator; null draws one")
    name: Text = Field(description="of the run; its folder is run_dir")
    work_dir: PathText = Field(description="holds the folders of all runs")
    run_dir: PathText = Field(description="the run's folder: config, metrics, checkpoints")
    mode: Literal["default", "debug", "exp", "smoke", "eval"]
    resume: Resume = Field(
        description="auto goes on where run_dir left off; or a checkpoint, also timm's .pth.tar"
    )
    test_after_training: bool
    verbose: bool = Field(description="log more")
    eval: Evaluation
    trainer: TrainerGroup
    train: Train
    datamodule: Datamodule
    model: Model
    optimizer: Optimizer
    optimizer_param_grouping: ParameterGrouping
    scheduler: Scheduler | None = Field(description="null: the learning rate stays")
    callbacks: Callbacks
    logger: Logger


SCHEMA = Schema(Config, open_groups=("model", "optimizer", "scheduler"))
