"""The configuration of a run: its schema, and how configs/*.yaml and KEY=VALUE become one.

    cfg = compose(["experiment=mnist/vit-monarch", "datamodule.data_dir=DIR"])

The schema has the keys with types, ranges and meanings; those of training are flow_train's. A key
that no file and no override sets has the default given there; one without a default must be set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf
from pydantic import BeforeValidator, Field

from flow_train.config import keys
from flow_train.config.compose import (
    REQUIRED,
    Composer,
    parse_override,
    whole,
    world_size,
    written,
)
from flow_train.config.keys import Above0, Below1, Count, Fraction, PathText, Positive
from flow_train.config.schema import Group, Schema, Text

# True is auto, and False nothing.
_RESUME = BeforeValidator(lambda value: {"True": "auto", "False": None}.get(str(value), value))
Resume = Annotated[PathText | None, _RESUME]


def _read_mapping(value: Any) -> Any:
    """The mapping that a text of a command line is, in the grammar of overrides."""
    if isinstance(value, str) and value.startswith("{"):
        return parse_override(f"cfg={value}", "cfg={_target_: monarch, nblocks: 8}").value()
    return value


# A mapping with a `_target_`, which monarch_flow.layers checks, or one of its short names.
Layers = Annotated[dict[str, Any] | str, BeforeValidator(_read_mapping)]
# One number for each of the three stages of a ViTAE.
Widths = Annotated[list[Positive], Field(min_length=3, max_length=3)]


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
    class_map: PathText | None = Field(
        None, description="as datamodule.class_map, for images of a part of the model's classes"
    )
    results_file: PathText | None = Field(description="write the figures to this file, as JSON")


class SparseToDense(Group):
    fraction: Fraction | None = Field(
        None,
        description="share of the epochs after which structured layers become dense; null: never",
    )


class InitFrom(Group):
    path: PathText | None = Field(description="start with this checkpoint's weights")
    project: bool = Field(description="project its dense weights onto the structured layers")
    use_ema: bool = Field(description="take their moving averages where it has them")
    reset_head: bool = Field(description="leave out its classifier, to train on other classes")


class Train(Group):
    global_batch_size: Positive = Field(description="images per optimizer step, all processes")
    lr_base: Above0 | None = Field(
        None, description="learning rate for lr_base_size images per step; optimizer.lr follows"
    )
    lr_base_size: Positive = Field(512, description="images that lr_base is for")
    loss_fn: keys.LossFunction
    loss_fn_val: keys.LossFunction
    scheduler_interval: Literal["epoch", "step"] = Field(
        description="the scheduler's unit of time, and when the learning rate moves"
    )
    sparse_to_dense: SparseToDense
    init_from: InitFrom


class TokenAttention(Group):
    local_context: Count = Field(0, description="keys in a window around each token; 0: no window")
    nb_features: Count = Field(0, description="random features of keys; 0: none")


class Model(Group):
    """Each model says which of these it takes; those that are set go to create_model."""

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
    mlp_ratio: Above0 | None = None
    token_ratio: Above0 | None = None
    channel_ratio: Above0 | None = None
    qkv_bias: bool | None = None
    tokens_type: Literal["performer", "transformer"] | None = None
    t2tattn1_cfg: TokenAttention | None = None
    t2tattn2_cfg: TokenAttention | None = None
    norm_eps: Above0 | None = None
    attn_drop_rate: Below1 | None = None
    drop_rate: Below1 = 0.0
    drop_path_rate: Below1 = 0.0
    mlp_cfg: Layers | None = Field(
        None, description="layers of the MLPs, in a mixer of those over channels; null: dense"
    )
    token_mlp_cfg: Layers | None = Field(None, description="the same of a mixer's MLPs over tokens")
    attnlinear_cfg: Layers | None = Field(None, description="layer of the projections to q, k, v")


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
    trainer: keys.Trainer
    train: Train
    datamodule: keys.Datamodule
    model: Model
    optimizer: keys.Optimizer
    optimizer_param_grouping: keys.ParameterGrouping
    scheduler: keys.Scheduler | None = Field(description="null: the learning rate stays")
    callbacks: keys.Callbacks
    logger: keys.Logger


SCHEMA = Schema(Config, open_groups=("model", "optimizer", "scheduler"))
CONFIGS = Path(__file__).resolve().parent / "configs"
# The folder of monarch_flow.compare's studies, the only one that is not a config group.
STUDY = "study"
# The value of optimizer.lr where it follows from train.lr_base.
SCALED_LR = "${scaled_lr:}"
_LAUNCH = "python -m oneflow.distributed.launch --nproc_per_node {} -m monarch_flow.train ..."

# How keys begin in timm or HazyResearch/fly, and here, so that commands of fly work as typed.
_THEIR_KEYS = {
    "opt": "optimizer",
    "sched": "scheduler",
    "drop": "model.drop_rate",
    "drop_path": "model.drop_path_rate",
    "model.drop": "model.drop_rate",
    "model.drop_path": "model.drop_path_rate",
    "optimizer._target_": "optimizer.name",
    "scheduler._target_": "scheduler.name",
    "data_dir": "datamodule.data_dir",
    "model.channel_mlp_cfg": "model.mlp_cfg",
    "train.cooldown_epochs": "scheduler.cooldown",
    "train.mixup": "datamodule.mixup",
    "train.optimizer": "optimizer",
    "train.optimizer_param_grouping": "optimizer_param_grouping",
    "train.scheduler": "scheduler",
    "trainer.gpus": "trainer.devices",
}
_FLY_EXPERIMENTS = {"imagenet-t2tvit-eval": "imagenet/t2tvit/t2tvit14t-eval"}


def check_data_dir(cfg: DictConfig) -> None:
    """Raise UserError where a run needs `datamodule.data_dir` and it is not set or not there."""
    dataset, folder = cfg.datamodule.dataset, cfg.datamodule.data_dir
    # An evaluation reads no training images.
    holds = {
        "folder": f"{'' if cfg.mode == 'eval' else 'train/CLASS/IMAGE and '}val/CLASS/IMAGE",
        "mnist": "train-images-idx3-ubyte.gz and the three others",
    }
    if dataset not in holds:
        return
    if folder is None:
        raise UserError(
            "where are the images? Give datamodule.data_dir=DIR, or set DATA_DIR in the "
            f"environment; DIR holds {holds[dataset]}"
        )
    if not Path(folder).exists():
        raise UserError(f"datamodule.data_dir={folder} is not there; it must hold {holds[dataset]}")


def with_our_names(override: str) -> str:
    """An override with the key or experiment that is meant here; any other text unchanged."""
    key, equals, value = override.partition("=")
    if key == "experiment":
        return f"experiment={_FLY_EXPERIMENTS.get(value.removesuffix('.yaml'), value)}"
    bare = key.lstrip("+")
    for theirs, ours in _THEIR_KEYS.items():
        if equals and f"{bare}.".startswith(f"{theirs}."):
            # opt=AdamW chooses an option, whose name is a file's.
            value = value.lower() if bare in ("opt", "sched") else value
            return f"{key[: len(key) - len(bare)]}{ours}{bare.removeprefix(theirs)}={value}"
    return override


def _settle(before: dict[str, Any], cfg: DictConfig, experiment: str | None) -> None:
    """Set what follows from other keys but cannot be an interpolation: the learning rate,
    the run's name, and which checkpoint an evaluation takes."""
    _settle_learning_rate(cfg, _learning_rate(before))
    if written(cfg, "name") is None:
        cfg.name = (experiment or "run").replace("/", "-")
    if written(cfg.eval, "ckpt") is not None:
        cfg.mode = "eval"
    elif written(cfg, "mode") == "eval":
        cfg.eval.ckpt = "${run_dir}"
    if written(cfg, "mode") == "eval" and written(cfg.train.init_from, "path") == REQUIRED:
        # What a run begins with is of no use to it later.
        cfg.train.init_from.path = None


def _settle_learning_rate(cfg: DictConfig, before: tuple[Any, Any]) -> None:
    """Let optimizer.lr and train.lr_base agree: the one set last gives the learning rate.

    `before` is what `_learning_rate` gave before the overrides. Raises UserError where both are set
    and disagree.
    """
    base, rate = _learning_rate(OmegaConf.to_container(cfg, resolve=False))
    if base is None or rate == SCALED_LR:
        return
    base_is_new, rate_is_new = base != before[0], rate != before[1]
    if base_is_new and not rate_is_new:
        cfg.optimizer.lr = SCALED_LR
    elif rate_is_new and not base_is_new:
        cfg.train.lr_base = None
    else:
        raise UserError(
            f"optimizer.lr={rate} and train.lr_base={base}: only one can say what the learning "
            f"rate is; leave one out, or in a file write optimizer.lr: {SCALED_LR}, which scales "
            "the other, or train.lr_base: null"
        )


def _learning_rate(values: Any) -> tuple[Any, Any]:
    """train.lr_base and optimizer.lr as they are written."""
    train, optimizer = (
        group if isinstance(group, dict) else {}
        for group in (values.get("train"), values.get("optimizer"))
    )
    return train.get("lr_base"), optimizer.get("lr")


def _check_together(values: Mapping[str, Any]) -> None:
    """Raise UserError for keys that mean nothing, or the wrong thing, with or without others."""
    name = values["name"]
    if Path(name).is_absolute() or not set(name.split("/")).isdisjoint({"", ".", ".."}):
        raise UserError(
            f"name={name}: the run's folder of that name is to be inside work_dir; name another "
            "place by work_dir=DIR or run_dir=DIR"
        )
    source = values["train"]["init_from"]
    for key in ("project", "reset_head"):
        # The weights that are evaluated are those of eval.ckpt.
        if source[key] and source["path"] is None and values["mode"] != "eval":
            raise UserError(
                f"train.init_from.{key}=true: of which weights? Give train.init_from.path=PATH"
            )
    evaluation = values["eval"]
    if values["mode"] != "eval":
        for key in ("results_file", "real_labels", "class_map"):
            if evaluation[key]:
                raise UserError(
                    f"eval.{key}={evaluation[key]}: training does not use it; evaluate with "
                    "eval.ckpt=PATH, or leave it out"
                )
    elif values["resume"] is not None:
        raise UserError(
            f"resume={values['resume']}: {evaluation['ckpt']} is evaluated (eval.ckpt), and no run "
            "goes on; leave one of the two out"
        )
    trainer = values["trainer"]
    if trainer["max_epochs"] is not None and trainer["min_epochs"] > trainer["max_epochs"]:
        raise UserError(
            f"trainer.min_epochs={trainer['min_epochs']} is more than trainer.max_epochs="
            f"{trainer['max_epochs']}"
        )
    if values["mode"] != "eval":
        _check_batch_sizes(values)


def _check_batch_sizes(values: Mapping[str, Any]) -> None:
    trainer, wanted_size = values["trainer"], values["train"]["global_batch_size"]
    processes, size = trainer["devices"], values["datamodule"]["batch_size"]
    if processes != world_size():
        raise UserError(
            f"trainer.devices={processes}, but this job has {world_size()} process"
            f"{'es' if world_size() > 1 else ''}; leave the key out, or start it with "
            f"{_LAUNCH.format(processes)}"
        )
    batches = trainer["accumulate_grad_batches"]
    if batches * processes * size != wanted_size:
        per_process = wanted_size // processes
        # The largest batch that divides a process's share.
        fits = (part for part in range(min(per_process, size), 0, -1) if per_process % part == 0)
        if wanted_size % processes:
            advice = f"train.global_batch_size={batches * processes * size}"
        elif per_process % size == 0:
            advice = f"trainer.accumulate_grad_batches={per_process // size}"
        else:
            advice = f"datamodule.batch_size={next(fits)}"
        raise UserError(
            f"train.global_batch_size={wanted_size} is not trainer.accumulate_grad_batches="
            f"{batches} x {processes} processes x datamodule.batch_size={size}, which is "
            f"{batches * processes * size}; {advice} would fit"
        )


def _scaled_lr(*, _root_: DictConfig) -> float:
    """The learning rate in proportion to the images of a step (Goyal et al. 2017, arXiv 1706.02677,
    section 2.1): train.lr_base times the images over train.lr_base_size."""
    base = _root_.train.lr_base
    if base is None:
        raise ValueError("train.lr_base is null: give it, or optimizer.lr=VALUE")
    return _number("train.lr_base", base) * _share(_root_)


def _scaled_decay(decay: float, *, _root_: DictConfig) -> float:
    """`decay` to the power of a step's images over train.lr_base_size, to forget the same per
    image."""
    if _number("scaled_decay", decay) < 0:
        raise ValueError(f"scaled_decay: {decay} is below 0")
    return float(decay ** _share(_root_))


def _share(root: DictConfig) -> float:
    (images,) = whole("train.global_batch_size", root.train.global_batch_size)
    (per,) = whole("train.lr_base_size", root.train.lr_base_size)
    if per < 1:
        raise ValueError(f"train.lr_base_size is {per}; it has to be 1 or more")
    return images / per


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} works on numbers, got {value!r}")
    return value


OmegaConf.register_new_resolver("scaled_lr", _scaled_lr, replace=True)
OmegaConf.register_new_resolver("scaled_decay", _scaled_decay, replace=True)

COMPOSER = Composer(
    CONFIGS,
    SCHEMA,
    example="trainer.max_epochs=10",
    renamed=with_our_names,
    settle=_settle,
    together=_check_together,
    apart=(STUDY,),
)
compose = COMPOSER.compose
