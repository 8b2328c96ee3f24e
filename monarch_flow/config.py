"""The configuration of a run: configs/*.yaml and KEY=VALUE overrides, checked by config_schema.py.

cfg = compose(["experiment=mnist/vit-monarch", "datamodule.data_dir=DIR"])
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf

from flow_train.config.compose import Composer, whole, world_size, written
from monarch_flow.config_schema import SCHEMA

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
        if source[key] and source["path"] is None:
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
        advice = (
            f"train.global_batch_size={batches * processes * size}"
            if wanted_size % processes
            else f"datamodule.batch_size={next(fits)}"
        )
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
