"""A whole run from its configuration: train and test, or evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import oneflow_accel
from oneflow_accel import distributed, watchdog
from oneflow_accel.agree import everywhere, on_rank_0, plain_values, require_same
from oneflow_accel.backends import Backend
from oneflow_accel.errors import UserError

from omegaconf import DictConfig
from oneflow import nn

from flow_train.checkpoint.folders import AUTO_RESUME, Checkpoint
from flow_train.config.files import save_config
from flow_train.data.datamodule import ImageDataModule
from flow_train.hooks import Hook, ModelCheckpoint, build_hooks
from flow_train.loop import Data, RunIdentity
from flow_train.metrics.log import require_loggers
from flow_train.metrics.profile import ProfileSteps
from flow_train.optim import build_loss, build_optimizer, build_schedule
from flow_train.options import TrainerOptions, as_plain, read_trainer_options, section
from flow_train.rng import seed_all, settled_seed
from flow_train.session import Recipe, Session
from flow_train.sharding import sharding_options
from flow_train.task import ImageTask
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
    asked = cfg.trainer.accelerator
    backend = everywhere(lambda: oneflow_accel.select_device(asked))
    with watchdog.guard():
        if not distributed.is_main():
            logger.setLevel(logging.WARNING)
        require_same({**plain_values(as_plain(cfg), _OF_A_MACHINE), "device": backend.name})
        if cfg.eval.ckpt is not None:
            seed_all(settled_seed(cfg.seed, option="seed="), backend)
            return evaluate_checkpoint(cfg, backend)
        metrics = _train(cfg, backend)
        if distributed.is_main():
            logger.info("%s", ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return metrics


def _train(cfg: DictConfig, backend: Backend) -> dict[str, float]:
    _settle_precision(cfg, backend)
    options, run_dir = read_trainer_options(cfg), Path(cfg.run_dir)
    profile = None if cfg.trainer.profile is None else ProfileSteps(cfg.trainer.profile, run_dir)
    if profile is not None:
        options = dataclasses.replace(options, max_steps=profile.all_steps, limit_val=0)
    everywhere(lambda: require_loggers(section(cfg, "logger")))
    # Runs that keep nothing to go on from.
    keeps = not (options.fast_dev_run or profile)
    if not keeps:
        what = "profile (trainer.profile)" if profile else "trial (trainer.fast_dev_run)"
        _require_no_resume(cfg, what)
    other = on_rank_0(lambda: read_other_run(cfg.resume))
    with (
        _session(cfg, backend, options, other, keeps=keeps) as run,
        contextlib.closing(everywhere(lambda: build_data(cfg, run.seed))) as data,
    ):
        require_same(data.contents())
        name, model = build_model(cfg, data)
        hooks = _hooks(cfg, options, model, profile)
        if other is not None:
            about = {"seed": run.seed, "images": cfg.train.global_batch_size}
            run.resumed = other.checkpoint(model, name, data.num_classes, **about)
        _load_weights(cfg, model, name, data.num_classes, run.resumed, SWITCH in hooks)
        run.claim()
        if keeps and distributed.is_main():
            save_config(cfg, run_dir)
        is_tested = cfg.test_after_training and keeps and options.limit_val != 0
        trainer = run.fit(
            model.to(backend.device()),
            _task(cfg, data),
            Data(data.train_loader, data.val_loader),
            _recipe(cfg, options, hooks),
            test_follows=is_tested and not run.log.has(run.first_step, "test"),
        )
        metrics = trainer.metrics | _best(hooks)
        if is_tested and not run.log.has(trainer.position.step, "test"):
            metrics |= test(trainer, data, run_dir, cfg)
        return metrics


def _best(hooks: Mapping[str, Hook]) -> dict[str, float]:
    """The best value of the metric that ModelCheckpoint watched, if there was one."""
    keeper = hooks.get("model_checkpoint")
    if not isinstance(keeper, ModelCheckpoint) or keeper.best_value is None:
        return {}
    return {f"best/{keeper.monitor}": keeper.best_value}


def _session(
    cfg: DictConfig,
    backend: Backend,
    options: TrainerOptions,
    other: OtherRun | None,
    *,
    keeps: bool,
) -> Session:
    asked = cfg.seed
    return Session(
        Path(cfg.run_dir),
        RunIdentity(cfg.model.name, as_plain(cfg), phase_of, run=cfg.name),
        cfg.resume if keeps and other is None else None,
        backend=backend,
        seed=other.seed if asked is None and other is not None else asked,
        resume_option="resume=auto" if keeps else None,
        keeps=keeps,
        by_all=options.fsdp is not None,
        keep_last=_KEEP_LAST,
        loggers=section(cfg, "logger"),
        accepts=lambda checkpoint: require_run(checkpoint, str(cfg.resume)),
        mesh=sharding_options(options.fsdp)["mesh"] if options.fsdp else None,
    )


def _task(cfg: DictConfig, data: ImageDataModule) -> ImageTask:
    return ImageTask(
        build_loss(cfg.train.loss_fn),
        data.image_shape,
        validation=build_loss(cfg.train.loss_fn_val, reduction="sum"),
        num_classes=data.num_classes,
    )


def _recipe(cfg: DictConfig, options: TrainerOptions, hooks: Mapping[str, Hook]) -> Recipe:
    groups = {"config": cfg.optimizer, "grouping": cfg.optimizer_param_grouping}
    schedule = build_schedule(cfg.scheduler, cfg.optimizer.lr)
    return Recipe(partial(build_optimizer, **groups), schedule, options, hooks)


def _hooks(
    cfg: DictConfig, options: TrainerOptions, model: nn.Module, profile: ProfileSteps | None
) -> dict[str, Hook]:
    share = cfg.train.sparse_to_dense.fraction
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
    # The first: the others begin an epoch with the model that it leaves.
    return {SWITCH: SparseToDense(share), **hooks}


def _require_no_resume(cfg: DictConfig, what: str) -> None:
    asked = cfg.resume
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
    if resumed is not None:
        load_model(model, resumed, name, num_classes, switches=switches)
    elif cfg.train.init_from.path is not None:
        initialize(model, **cfg.train.init_from)


def _settle_precision(cfg: DictConfig, backend: Backend) -> None:
    """Train in float32, and say so, where the device lacks the mixed precision that the published
    recipes ask for."""
    asked = cfg.trainer.precision
    support = backend.supports("amp")
    if asked in (16, "16", "float16") and not support:
        if distributed.is_main():
            logger.warning(
                "%s: trainer.precision=%s becomes float32: %s", backend.name, asked, support.reason
            )
        cfg.trainer.precision = "float32"
