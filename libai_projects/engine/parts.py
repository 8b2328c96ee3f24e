"""What a LiBai config is made of, in the order in which one needs the other: the log and the layout
of the processes, tokenizer, loaders, model, optimizer, schedule and graphs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError

import oneflow as flow
from libai.config import LazyConfig, try_get_key
from libai.data.data_utils import compile_helper
from libai.engine import DefaultTrainer
from libai.engine.default import _check_batch_size
from libai.tokenizer import build_tokenizer
from libai.utils import distributed as dist
from libai.utils.logger import setup_logger
from omegaconf import DictConfig, ListConfig
from oneflow import nn

from flow_train.metrics.work import training_flops
from libai_projects import weights
from libai_projects.command.adapt import amp_precision
from libai_projects.command.check_files import weights_format
from libai_projects.engine.steps import Maker
from libai_projects.engine.task import SPLITS, LibaiTask, Loader, replicas
from libai_projects.models.families import table_of
from libai_projects.text.loaders import use_ours
from libai_projects.weights.monarch import KEYS

logger = logging.getLogger("libai_projects")


def set_up(cfg: DictConfig, resume: bool) -> None:
    """LiBai's `default_setup`: log, layout of the processes, config.yaml; options of collectives
    only where config and device have them. Raises UserError for train.rdma_enabled without RDMA."""
    output = Path(cfg.train.output_dir)
    if distributed.is_main():
        output.mkdir(parents=True, exist_ok=True)
    cfg.train.resume = resume
    log = setup_logger(str(output), distributed_rank=distributed.rank())
    log.info(
        "Rank of current process: %d. World size: %d", distributed.rank(), distributed.world_size()
    )
    dist.setup_dist_util(cfg.train.dist)
    _check_batch_size(cfg)
    if distributed.is_main():
        LazyConfig.save(cfg, str(output / "config.yaml"))
        log.info("Full config saved to %s", output / "config.yaml")
    if oneflow_accel.current_backend().collective_backend == "nccl":
        for key, use in (
            ("nccl_fusion_threshold_mb", flow.boxing.nccl.set_fusion_threshold_mbytes),
            ("nccl_fusion_max_ops", flow.boxing.nccl.set_fusion_max_ops_num),
        ):
            if cfg.train.get(key) is not None:
                use(cfg.train[key])
    if cfg.train.get("rdma_enabled"):
        devices = Path("/sys/class/infiniband")
        if not flow.sysconfig.with_rdma() or not devices.is_dir() or not any(devices.iterdir()):
            # Without the device oneflow would end the process.
            raise UserError(
                "train.rdma_enabled=True, but oneflow was built without RDMA or this machine has "
                f"no RDMA device ({devices} is empty): set it to False"
            )
        flow.env.init_rdma()
    # All processes look: if only one ended here, the others would wait for it.
    compile_helper()


def make_tokenizer(cfg: DictConfig) -> Any:
    """The tokenizer; its vocabulary is padded to one size for all tensor parallel sizes that divide
    make_vocab_size_divisible_by, so that a checkpoint of one layout fits another."""
    if try_get_key(cfg, "tokenization") is None:
        return None
    tokenizer = build_tokenizer(cfg.tokenization)
    if try_get_key(cfg, "model.cfg.vocab_size", default=None) is not None:
        multiple = math.lcm(
            cfg.tokenization.make_vocab_size_divisible_by, cfg.train.dist.tensor_parallel_size
        )
        cfg.model.cfg.vocab_size = tokenizer.padded_vocab_size(multiple)
    return tokenizer


@dataclass(frozen=True)
class Loaders:
    """`train` is LiBai's; those to evaluate are by the names of their splits in metrics.jsonl."""

    train: Any
    evaluated: dict[str, Loader]


def make_loaders(cfg: DictConfig, tokenizer: Any, consumed_samples: int = 0) -> Loaders:
    """The loaders for training, from so many samples of the run on, and for evaluation."""
    cfg.dataloader.consumed_samples = consumed_samples
    if try_get_key(cfg, "dataloader.train") is not None:
        cfg.dataloader.train.consumed_samples = consumed_samples
    use_ours(cfg.dataloader.train)
    use_ours(try_get_key(cfg, "dataloader.test", default=None))
    train, *splits = DefaultTrainer.build_train_loader(cfg, tokenizer)
    found = dict(zip(("validation", "test"), splits, strict=True))
    others = list(DefaultTrainer.build_test_loader(cfg, tokenizer))
    alone = len(others) == 1 and found["test"] is None
    found |= {"test" if alone else f"test_{n}": loader for n, loader in enumerate(others)}
    rows, batches = cfg.train.test_micro_batch_size, cfg.train.evaluation.eval_iter
    evaluated = {}
    for split, loader in found.items():
        if loader is not None:
            there = math.ceil(len(loader.dataset) / (rows * replicas()))
            wrapped = Loader(loader, min(batches, there), rows, replicas())
            evaluated[SPLITS.get(split, split)] = wrapped
    return Loaders(train, evaluated)


def settle_length(cfg: DictConfig, train: Any) -> None:
    """Fill in the length of the run, and periods that are given in epochs."""
    # LiBai would count micro batches in eager mode, and say a warm-up that is not in force where a
    # schedule has one of its own.
    steps, cfg.train.num_accumulation_steps = cfg.train.num_accumulation_steps, 1
    theirs = logging.getLogger(DefaultTrainer.__module__)
    theirs.disabled = True
    DefaultTrainer.auto_scale_hyperparams(cfg, train)
    theirs.disabled = False
    cfg.train.num_accumulation_steps = steps
    warm_up = cfg.train.scheduler.get("warmup_iters", cfg.train.warmup_iter)
    logger.info("%d iterations, warm-up over %d of them", cfg.train.train_iter, warm_up)
    steps_per_epoch = len(train.dataset) / cfg.train.global_batch_size
    for group, key_of_epochs, key_of_period in (
        ("checkpointer", "save_model_after_n_epoch", "period"),
        ("evaluation", "eval_after_n_epoch", "eval_period"),
    ):
        epochs = try_get_key(cfg, f"train.{group}.{key_of_epochs}", default=None)
        if epochs is None:
            continue
        if epochs <= 0:
            raise UserError(f"train.{group}.{key_of_epochs} is {epochs}; it must be above 0")
        cfg.train[group][key_of_period] = max(1, math.ceil(steps_per_epoch * epochs))


@contextmanager
def _float16_alone(cfg: DictConfig) -> Iterator[None]:
    """LiBai takes train.amp.enabled for float16, with a scaled loss; other precisions are ours."""
    enabled = try_get_key(cfg, "train.amp.enabled", default=False)
    if enabled:
        cfg.train.amp.enabled = amp_precision(cfg) == "float16"
    try:
        yield
    finally:
        if enabled:
            cfg.train.amp.enabled = enabled


def make_model(cfg: DictConfig) -> nn.Module:
    with _float16_alone(cfg):
        return DefaultTrainer.build_model(cfg)


def make_dense(cfg: DictConfig) -> None:
    """Have the config's model made with dense layers only."""
    for key in KEYS:
        if cfg.model.cfg.get(key) is not None:
            cfg.model.cfg[key] = None


def make_graph(cfg: DictConfig, model: nn.Module, *parts: Any, is_train: bool = True) -> nn.Graph:
    with _float16_alone(cfg):
        return DefaultTrainer.build_graph(cfg, model, *parts, is_train=is_train)


def maker(cfg: DictConfig) -> Maker:
    return Maker(
        lambda model: _make_optimizer(cfg, model),
        lambda optimizer: _make_schedule(cfg, optimizer),
        (lambda *parts, **mode: make_graph(cfg, *parts, **mode)) if cfg.graph.enabled else None,
    )


def _make_schedule(cfg: DictConfig, optimizer: flow.optim.Optimizer) -> Any:
    try:
        return DefaultTrainer.build_lr_scheduler(cfg, optimizer)
    except ValueError as error:
        text = "This schedule is no multiple of each rate: train.warmup_ratio=0 has no warm-up."
        raise UserError(f"train.scheduler: {error} {text}") from error


def _make_optimizer(cfg: DictConfig, model: nn.Module) -> flow.optim.Optimizer:
    """The optimizer; its settings are plain values, not nodes of the config."""
    optimizer = DefaultTrainer.build_optimizer(cfg, model)
    for group in optimizer.param_groups:
        for name, value in group.options.items():
            if isinstance(value, ListConfig):
                group.options[name] = tuple(value)
    return optimizer


def make_task(cfg: DictConfig) -> LibaiTask:
    dataset: Any = try_get_key(cfg, "dataloader.train.dataset", default=None)
    tokens = dataset[0].get("max_seq_length") if dataset else None

    def macs() -> float | None:
        try:
            table = table_of(try_get_key(cfg, "model._target_"))
            flops = table.flops_per_token(try_get_key(cfg, "model.cfg", default=None))
        except (AttributeError, KeyError, TypeError):
            logger.debug("no MFU: another model may have other names for its sizes")
            return None
        return None if tokens is None else flops / training_flops(1)

    return LibaiTask(
        tokens,
        macs,
        lambda: _make_evaluator(cfg),
        cfg.train.test_micro_batch_size * replicas(),
        cfg.train.evaluation.eval_iter,
    )


def _make_evaluator(cfg: DictConfig) -> Any:
    use_ours(cfg.train.evaluation.evaluator)
    return DefaultTrainer.build_evaluator(cfg)


def load_weights(model: nn.Module, path: str) -> None:
    """Load a checkpoint or Hugging Face directory into a global model of any layout, which keeps
    its own vocabulary size. Raises UserError for a damaged directory or another model."""
    table = table_of(model)
    state, _ = weights.load(path, on_rank_0(lambda: weights_format(path)), table=table)
    weights.load_into(model, state, table=table)
    logger.info("loaded the weights of %s", path)
