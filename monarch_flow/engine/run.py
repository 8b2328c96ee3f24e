"""A whole run from its configuration: train and test, or evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import oneflow_accel
from oneflow_accel import distributed, watchdog
from oneflow_accel.agree import everywhere, on_rank_0, plain_values, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.errors import UserError

import oneflow as flow
from omegaconf import DictConfig
from oneflow import nn

from flow_train.checkpoint.folders import (
    AUTO_RESUME,
    Checkpoint,
)
from flow_train.config.files import save_config
from flow_train.config.schema import read
from flow_train.data.datamodule import ImageDataModule
from flow_train.hooks import Hook, ModelCheckpoint, build_hooks
from flow_train.loop import Data, Identity
from flow_train.metrics.log import require_loggers
from flow_train.metrics.profile import ProfileSteps
from flow_train.optim import build_loss, build_optimizer, build_schedule
from flow_train.options import TrainerOptions, as_plain, read_trainer_options, section
from flow_train.rng import seed_all, settled_seed
from flow_train.session import Recipe, Session
from flow_train.sharding import sharding_options
from flow_train.task import ImageTask
from monarch_flow.config import SparseToDense as SwitchKeys
from monarch_flow.engine.build import build_data, build_model
from monarch_flow.engine.evaluation import evaluate_checkpoint, test
from monarch_flow.engine.other_run import OtherRun, read_other_run
from monarch_flow.engine.sparse_to_dense import SparseToDense
from monarch_flow.engine.weights import initialize, load_model, phase_of, require_run
from monarch_flow.projection import structured_layers

# Newest checkpoints to keep besides the best: two, in case the last one is damaged.
_KEEP_LAST = 2
# Keys whose values may differ between the machines of a job: paths, and what is of each alone.
_OF_A_MACHINE = ("dir", "resume", "ckpt", "path", "file", "map", "labels", "num_workers", "devices")

SWITCH = "sparse_to_dense"

logger = logging.getLogger("oneflow_accel")


def run(cfg: DictConfig) -> dict[str, float]:
    """Do what a composed configuration says.

    Returns:
        The last training and validation metrics, those of the best checkpoint's test, and "best/"
        with the metric that ModelCheckpoint watched; accuracy in percent. For an evaluation its
        metrics.

    Raises:
        UserError: anything the user can mend.
        SystemExit: the process was told to end (SIGTERM, Ctrl-C) and has written a checkpoint.
    """
    asked = cfg.get("trainer", {}).get("accelerator")
    backend = everywhere(lambda: oneflow_accel.select_device(asked))
    with watchdog.guard():
        if not distributed.is_main():
            logger.setLevel(logging.WARNING)
        require_same({**plain_values(as_plain(cfg), _OF_A_MACHINE), "device": backend.name})
        if section(cfg, "eval").get("ckpt") is not None:
            seed_all(settled_seed(cfg.get("seed"), option="seed="), backend)
            return evaluate_checkpoint(cfg, backend)
        return _train(cfg, backend)


def _train(cfg: DictConfig, backend: Backend) -> dict[str, float]:
    run_dir = Path(cfg.run_dir)
    _settle_precision(cfg, backend)
    options = read_trainer_options(cfg)
    profiled = section(cfg, "trainer").get("profile")
    profile = None if profiled is None else ProfileSteps(int(profiled), run_dir)
    if profile is not None:
        options = dataclasses.replace(options, max_steps=profile.all_steps, limit_val=0)
    everywhere(lambda: require_loggers(section(cfg, "logger")))
    # Runs that keep nothing to go on from.
    keeps = not (options.fast_dev_run or profile)
    if not keeps:
        what = "profile (trainer.profile)" if profile else "trial (trainer.fast_dev_run)"
        _require_no_resume(cfg, what)
    other = on_rank_0(lambda: read_other_run(cfg.get("resume")))
    with _session(cfg, backend, options, other, keeps=keeps) as run:
        data = everywhere(lambda: build_data(cfg, run.seed))
        with contextlib.closing(data):
            require_same(data.contents())
            name, model = build_model(cfg, data)
            hooks = _hooks(cfg, options, model, profile)
            if other is not None:
                about = {"seed": run.seed, "images": int(cfg.train.global_batch_size)}
                run.resumed = other.checkpoint(model, name, data.num_classes, **about)
            _load_weights(cfg, model, name, data.num_classes, run.resumed, SWITCH in hooks)
            run.claim()
            if keeps and distributed.is_main():
                save_config(cfg, run_dir)
            is_tested = cfg.get("test_after_training", True) and keeps and options.limit_val != 0
            trainer = run.fit(
                model.to(backend.device()),
                _task(cfg, data),
                Data(data.train_loader(), data.val_loader()),
                Recipe(partial(_optimizer, cfg), _schedule(cfg), options, hooks),
                test_follows=is_tested and not run.log.has(run.first_step, "test"),
            )
            metrics = dict(trainer.metrics)
            keeper = hooks.get("model_checkpoint")
            if isinstance(keeper, ModelCheckpoint) and keeper.best_value is not None:
                metrics[f"best/{keeper.monitor}"] = keeper.best_value
            if is_tested and not run.log.has(trainer.position.step, "test"):
                metrics |= test(trainer, data, run_dir, cfg)
    if distributed.is_main():
        logger.info("%s", ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


def _session(
    cfg: DictConfig,
    backend: Backend,
    options: TrainerOptions,
    other: OtherRun | None,
    *,
    keeps: bool,
) -> Session:
    asked = cfg.get("seed")
    return Session(
        Path(cfg.run_dir),
        Identity(cfg.model.name, as_plain(cfg), phase_of, run=str(cfg.get("name"))),
        cfg.get("resume") if keeps and other is None else None,
        backend=backend,
        seed=other.seed if asked is None and other is not None else asked,
        resume_option="resume=auto" if keeps else None,
        keeps=keeps,
        by_all=options.fsdp is not None,
        keep_last=_KEEP_LAST,
        loggers=section(cfg, "logger"),
        accepts=lambda checkpoint: require_run(checkpoint, str(cfg.get("resume"))),
        mesh=sharding_options(options.fsdp)["mesh"] if options.fsdp else None,
    )


def _task(cfg: DictConfig, data: ImageDataModule) -> ImageTask:
    losses = section(cfg, "train")
    return ImageTask(
        build_loss(losses.get("loss_fn")),
        data.image_shape,
        validation=build_loss(losses.get("loss_fn_val"), reduction="sum"),
        num_classes=data.num_classes,
    )


def _optimizer(cfg: DictConfig, model: nn.Module) -> flow.optim.Optimizer:
    given = {key: value for key, value in section(cfg, "optimizer").items() if value is not None}
    return build_optimizer(model, given, section(cfg, "optimizer_param_grouping"))


def _schedule(cfg: DictConfig) -> Callable[[float], float]:
    scheduler = None if cfg.get("scheduler") is None else section(cfg, "scheduler")
    return build_schedule(scheduler, float(cfg.optimizer.lr))


def _hooks(
    cfg: DictConfig, options: TrainerOptions, model: nn.Module, profile: ProfileSteps | None
) -> dict[str, Hook]:
    asked = section(cfg, "train").get("sparse_to_dense")
    share = read(SwitchKeys, asked, "train.sparse_to_dense").fraction
    hooks = build_hooks(section(cfg, "callbacks"))
    if profile is not None:
        # Of the layers that the run begins with.
        return {**hooks, "profile": profile}
    if share is None:
        return hooks
    if not structured_layers(model):
        raise UserError(
            f"train.sparse_to_dense.fraction={share:g}: the model has no structured "
            "layer to become dense; choose one with model.mlp_cfg, or leave the fraction out"
        )
    if options.fsdp is not None:
        raise UserError(
            f"trainer.fsdp={options.fsdp}: layers become dense only where each process has them "
            "whole; leave trainer.fsdp or train.sparse_to_dense.fraction out"
        )
    # The first: the others begin an epoch with the model that it leaves.
    return {SWITCH: SparseToDense(share), **hooks}


def _require_no_resume(cfg: DictConfig, what: str) -> None:
    asked = cfg.get("resume")
    if asked == AUTO_RESUME:
        logger.info("resume=auto: a %s begins afresh, and writes no checkpoint", what)
    elif asked is not None:
        raise UserError(
            f"resume={asked}: a {what} begins afresh; leave one of the two "
            f"out, or begin with its weights: train.init_from.path={asked}"
        )


def _load_weights(
    cfg: DictConfig,
    model: nn.Module,
    name: str,
    num_classes: int,
    resumed: Checkpoint | None,
    switches: bool,
) -> None:
    source = section(cfg, "train").get("init_from") or {}
    if resumed is not None:
        load_model(model, resumed, name, num_classes, switches=switches)
    elif source.get("path") is not None:
        initialize(
            model,
            source["path"],
            project=bool(source.get("project")),
            use_ema=bool(source.get("use_ema", True)),
            reset_head=bool(source.get("reset_head")),
        )


def _settle_precision(cfg: DictConfig, backend: Backend) -> None:
    """Train in float32, and say so, where the device lacks the mixed precision that the published
    recipes ask for."""
    asked = cfg.trainer.get("precision")
    support = backend.supports("amp")
    if asked in (16, "16", "float16") and not support:
        if distributed.is_main():
            logger.warning(
                "%s: trainer.precision=%s becomes float32: %s", backend.name, asked, support.reason
            )
        cfg.trainer.precision = "float32"
