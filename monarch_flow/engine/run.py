"""A whole run from its configuration: train and test, or evaluate."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import oneflow_accel
from oneflow_accel import distributed, watchdog
from oneflow_accel.backends import Backend
from oneflow_accel.errors import UserError

from omegaconf import DictConfig
from oneflow import nn

from flow_train.agreement import from_rank, plain_values, require_same, together
from flow_train.checkpoint.folders import (
    AUTO_RESUME,
    CURVES_NAME,
    Checkpoint,
    agreed_checkpoint,
    claimed,
    way_on,
)
from flow_train.config.files import save_config
from flow_train.config.schema import read
from flow_train.hooks import ModelCheckpoint, build_hooks
from flow_train.loop import Data, Identity, Trainer
from flow_train.metrics.curves import draw_curves
from flow_train.metrics.log import JSONL_NAME, RunLog, require_loggers
from flow_train.metrics.profile import ProfileSteps
from flow_train.optim import build_loss, build_optimizer, build_schedule
from flow_train.options import Calendar, as_plain, read_trainer_options, section
from flow_train.rng import seed_all, settled_seed
from flow_train.sharding import sharding_options
from flow_train.steps.graph import step_maker
from monarch_flow.config import SparseToDense as SwitchKeys
from monarch_flow.engine.build import build_data, build_model
from monarch_flow.engine.evaluation import evaluate_checkpoint, test
from monarch_flow.engine.other_run import read_other_run
from monarch_flow.engine.sparse_to_dense import SparseToDense
from monarch_flow.engine.weights import initialize, load_model, phase_of, require_run
from monarch_flow.projection import structured_layers

# Newest checkpoints to keep besides the best: two, in case the last one is damaged.
_KEEP_LAST = 2
# Keys whose values may differ between the machines of a job: paths, and what is of each alone.
_OF_A_MACHINE = ("dir", "resume", "ckpt", "path", "file", "map", "labels", "num_workers", "devices")

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
    backend = together(lambda: oneflow_accel.select_device(asked))
    with watchdog.guard():
        if not distributed.is_main():
            logger.setLevel(logging.WARNING)
        require_same({**plain_values(as_plain(cfg), _OF_A_MACHINE), "device": backend.name})
        if section(cfg, "eval").get("ckpt") is not None:
            seed_all(settled_seed(cfg.get("seed"), option="seed="), backend)
            return evaluate_checkpoint(cfg, backend)
        try:
            return _train(cfg, backend)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(way_on(Path(cfg.run_dir), "resume=auto")) from None


def _train(cfg: DictConfig, backend: Backend) -> dict[str, float]:
    run_dir = Path(cfg.run_dir)
    _settle_precision(cfg, backend)
    options = read_trainer_options(cfg)
    profiled = section(cfg, "trainer").get("profile")
    profile = None if profiled is None else ProfileSteps(int(profiled), run_dir)
    if profile is not None:
        options = dataclasses.replace(options, max_steps=profile.all_steps, limit_val=0)
    # Runs that keep nothing to go on from.
    trial = bool(options.fast_dev_run or profile)
    together(lambda: require_loggers(section(cfg, "logger")))
    if trial:
        what = "profile (trainer.profile)" if profile else "trial (trainer.fast_dev_run)"
        _require_no_resume(cfg, what)
    other = from_rank(lambda: read_other_run(cfg.get("resume")))
    mesh = sharding_options(options.fsdp)["mesh"] if options.fsdp else None
    resumed = None if trial or other else agreed_checkpoint(cfg.get("resume"), run_dir, mesh)
    if resumed is not None:
        require_run(resumed, str(cfg.get("resume")))
    asked = cfg.get("seed")
    if asked is None and other is not None:
        asked = other.seed
    began_with = None if resumed is None else int(resumed.state["seed"])
    seed = settled_seed(asked, began_with, option="seed=")
    seed_all(seed, backend)
    data = together(lambda: build_data(cfg, seed))
    require_same(data.contents())
    name, model = build_model(cfg, data)
    switching = section(cfg, "train").get("sparse_to_dense")
    share = read(SwitchKeys, switching, "train.sparse_to_dense").fraction
    if profile is not None:
        # The layers as the run begins with them.
        share = None
    # The first of the callbacks: the others begin an epoch with the model that it leaves.
    switch = {} if share is None else {"sparse_to_dense": SparseToDense(share)}
    if switch and not structured_layers(model):
        raise UserError(
            f"train.sparse_to_dense.fraction={share:g}: the model has no structured "
            "layer to become dense; choose one with model.mlp_cfg, or leave the fraction out"
        )
    if switch and options.fsdp is not None:
        raise UserError(
            f"trainer.fsdp={options.fsdp}: layers become dense only where each process has them "
            "whole; leave trainer.fsdp or train.sparse_to_dense.fraction out"
        )
    if other is not None:
        images = int(cfg.train.global_batch_size)
        resumed = other.checkpoint(model, name, data.num_classes, seed=seed, images=images)
    _load_weights(cfg, model, name, data.num_classes, resumed, bool(switch))
    model = model.to(backend.device())

    train_loader, val_loader = data.train_loader(), data.val_loader()
    scheduler = None if cfg.get("scheduler") is None else section(cfg, "scheduler")
    schedule = build_schedule(scheduler, float(cfg.optimizer.lr))
    calendar = Calendar(options, len(train_loader), schedule)
    if calendar.batches == 0:
        raise UserError(
            "an epoch has no step: there are fewer training images than datamodule.batch_size, or "
            "trainer.limit_train_batches is 0"
        )
    hooks = {**switch, **build_hooks(section(cfg, "callbacks"))}
    if trial:
        hooks.pop("model_checkpoint", None)
    if profile is not None:
        hooks["profile"] = profile
    checkpoints = None
    if not trial:
        own, shards = None if other is not None else resumed, options.fsdp is not None
        checkpoints = claimed(run_dir, own, keep_last=_KEEP_LAST, by_all=shards)
        if distributed.is_main():
            save_config(cfg, run_dir)
    config = as_plain(cfg)
    log = RunLog(
        run_dir,
        section(cfg, "logger"),
        run_name=str(cfg.get("name")),
        config=config,
        enabled=distributed.is_main() and not trial,
    )
    losses, grouping = section(cfg, "train"), section(cfg, "optimizer_param_grouping")
    given = {key: value for key, value in section(cfg, "optimizer").items() if value is not None}
    val_loss = build_loss(losses.get("loss_fn_val"), reduction="sum")
    try:
        make_step = step_maker(
            backend,
            options,
            calendar,
            lambda model: build_optimizer(model, given, grouping),
            lambda: build_loss(losses.get("loss_fn")),
        )
        trainer = Trainer(
            model,
            make_step,
            Data(train_loader, val_loader, data.image_shape, val_loss),
            backend,
            options,
            calendar,
            identity=Identity(name, data.num_classes, seed, config, phase=phase_of),
            hooks=hooks,
            log=log,
            checkpoints=checkpoints,
            resumed=resumed,
        )
        wants_test = cfg.get("test_after_training", True) and not trial and options.limit_val != 0
        trainer.fit(test_follows=wants_test and not log.has(trainer.position.step, "test"))
        metrics = dict(trainer.metrics)
        keeper = hooks.get("model_checkpoint")
        if isinstance(keeper, ModelCheckpoint) and keeper.best_value is not None:
            metrics[f"best/{keeper.monitor}"] = keeper.best_value
        if wants_test and not log.has(trainer.position.step, "test"):
            metrics |= test(trainer, data, run_dir, cfg)
    finally:
        log.close()
        data.close()
        if checkpoints is not None:
            checkpoints.close()
    if distributed.is_main():
        logger.info("%s", ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if not trial:
            curves = draw_curves(run_dir / JSONL_NAME, run_dir / CURVES_NAME)
            logger.info("curves: %s", curves or "off")
    return metrics


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
