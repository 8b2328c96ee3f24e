"""Checks of what steers the training: lengths and periods, evaluation, optimizer, schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from oneflow_accel.errors import UserError, did_you_mean

import numpy as np
import oneflow as flow
from libai.config import try_get_key
from libai.optim import build_optimizer
from libai.scheduler import build_lr_scheduler
from omegaconf import DictConfig, ListConfig, OmegaConf

from flow_train.metrics.log import require_loggers
from libai_projects.engine.check_files import Note
from libai_projects.weights import monarch

# These keys are whole numbers; the value is the least that each may be. The model's are in
# models/options.py.
_COUNTS = {
    "train.train_iter": 0,
    "train.start_iter": 0,
    "train.log_period": 1,
    "train.seed": 0,
    "train.train_micro_batch_size": 1,
    "train.global_batch_size": 1,
    "train.num_accumulation_steps": 1,
    "train.test_micro_batch_size": 1,
    "train.zero_optimization.stage": 0,
    "train.nccl_fusion_threshold_mb": 0,
    "train.nccl_fusion_max_ops": 0,
    "train.dist.pipeline_num_layers": 1,
    "train.checkpointer.period": 1,
    "train.checkpointer.max_to_keep": 1,
    "train.checkpointer.save_model_after_n_epoch": 1,
    "train.evaluation.eval_iter": 1,
    "train.evaluation.eval_period": 1,
    "train.evaluation.eval_after_n_epoch": 1,
    "train.evaluation.patience": 1,
    "dataloader.train.num_workers": 0,
    "tokenization.make_vocab_size_divisible_by": 1,
}
# Operators hold whole numbers as int32 or add them up in int64, seeds are int64, and scores and
# weights are float32.
_MOST, _MOST_SEED, _MOST_FLOAT = 2**31 - 1, 2**63 - 1, float(np.finfo(np.float32).max)
# The results that an evaluation gives for each split.
_RESULTS = ("lm_loss_PPL", "lm_loss", "lm_loss_tokens")


def check_all(cfg: DictConfig, note: Note) -> None:
    """Run every check of this file through `note`, which collects what they raise."""
    note(lambda: check_steps(cfg))
    note(lambda: check_evaluation(cfg))
    note(lambda: check_optimizer(cfg))
    note(lambda: require_loggers(cfg.train.get("logger") or {}))


def check_numbers(cfg: DictConfig) -> None:
    """Check that every number of a config is finite, that none is too large for what holds it, and
    that counts are whole numbers; the checks below and the trainer reckon with them."""
    wrong = []
    for key, value in _numbers(cfg):
        most = _MOST_FLOAT if isinstance(value, float) else _MOST
        most = _MOST_SEED if key.endswith("seed") else most
        if isinstance(value, float) and not math.isfinite(value):
            wrong.append(f"{key}={value} is not finite")
        elif abs(value) > most:
            wrong.append(f"{key}={value} is beyond {most}, the largest that there is")
    for key, least in _COUNTS.items():
        number = try_get_key(cfg, key, default=None)
        if number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            wrong.append(f"{key}={number} is not a whole number")
        elif number < least:
            wrong.append(f"{key}={number} is less than {least}")
    if wrong:
        raise UserError("\n  - ".join(wrong))


def check_steps(cfg: DictConfig) -> None:
    """Check lengths and periods, and that ZeRO and activation checkpointing have nn.Graph."""
    epochs = try_get_key(cfg, "train.train_epoch", default=None)
    if epochs is not None and not (_is_number(epochs) and epochs >= 0):
        raise UserError(f"train.train_epoch={epochs}: a number from 0 on")
    minutes = try_get_key(cfg, "train.max_minutes", default=None)
    if minutes is not None and not (_is_number(minutes) and minutes > 0):
        raise UserError(f"train.max_minutes={minutes}: a number above 0, or null for no limit")
    ratio = try_get_key(cfg, "train.warmup_ratio", default=0)
    if not (_is_number(ratio) and 0 <= ratio < 1):
        raise UserError(f"train.warmup_ratio={ratio}: a share of the run, from 0 to below 1")
    share = try_get_key(cfg, "train.sparse_to_dense.fraction", default=None)
    if share is not None and not (_is_number(share) and 0 <= share <= 1):
        raise UserError(f"train.sparse_to_dense.fraction={share}: a share of the run, 0 to 1")
    if share is not None and not monarch.layers(try_get_key(cfg, "model.cfg", default={})):
        keys = " or ".join(f"model.cfg.{key}=monarch" for key in monarch.KEYS)
        raise UserError(
            f"train.sparse_to_dense.fraction={share}, but all layers are dense; give {keys}"
        )
    if not (cfg.train.get("train_iter") or cfg.train.get("train_epoch")):
        raise UserError("nothing to train: train.train_iter and train.train_epoch are 0")
    if cfg.graph.enabled:
        stage = try_get_key(cfg, "train.zero_optimization.stage", default=1)
        zero = try_get_key(cfg, "train.zero_optimization.enabled", default=False)
        if zero and not 1 <= stage <= 3:
            raise UserError(f"train.zero_optimization.stage={stage} is not 1, 2 or 3")
        return
    for key in ("train.zero_optimization.enabled", "train.activation_checkpoint.enabled"):
        if try_get_key(cfg, key, default=False):
            raise UserError(f"{key}=true needs nn.Graph: graph.enabled=true")


def check_evaluation(cfg: DictConfig) -> None:
    """Check what the best model and early stopping go by: eval_metric and eval_mode."""
    evaluation = cfg.train.get("evaluation")
    if not evaluation or not evaluation.enabled:
        return
    mode = evaluation.get("eval_mode")
    if mode not in (None, "min", "max"):
        raise UserError(f"train.evaluation.eval_mode={mode} is neither min nor max")
    metric = evaluation.get("eval_metric")
    # Only the results of PPLEvaluator are known before the run.
    if metric is None or _name_of(evaluation.get("evaluator")) != "PPLEvaluator":
        return
    tests = len(try_get_key(cfg, "dataloader.test", default=None) or [])
    splits = ["validation", "test", *(f"test_{number}" for number in range(tests))]
    split, _, name = str(metric).rpartition("/")
    if name not in _RESULTS or (split and split not in splits):
        known = [f"{split}/{result}" for split in splits for result in _RESULTS]
        hint = did_you_mean(str(metric), known, "take validation/lm_loss_PPL")
        raise UserError(
            f"train.evaluation.eval_metric={metric} is no result of the evaluation; {hint}"
        )


def check_optimizer(cfg: DictConfig) -> None:
    """Check that the optimizer and the schedule can be made, on a parameter of one element."""
    optim = cfg.get("optim")
    if optim is None:
        return
    clip = try_get_key(optim, "params.clip_grad_max_norm", default=None)
    if clip is not None and not (_is_number(clip) and clip > 0):
        raise UserError(
            f"optim.params.clip_grad_max_norm={clip}: a number above 0, or null to clip nothing"
        )
    for name in ("weight_decay_norm", "weight_decay_bias", "clip_grad_norm_type"):
        decay = try_get_key(optim, f"params.{name}", default=None)
        if decay is not None and not (_is_number(decay) and decay >= 0):
            raise UserError(f"optim.params.{name}={decay}: a number from 0 on, or null")
    trial = copy.deepcopy(optim)
    optimizer = _made("optim", trial, lambda: build_optimizer(trial, flow.nn.Linear(1, 1)))
    scheduler = copy.deepcopy(cfg.train.get("scheduler"))
    if scheduler is None:
        return
    # The trainer fills both in when it knows the data.
    scheduler.max_iter = max(cfg.train.get("train_iter") or 0, 1)
    scheduler.warmup_iter = 1 if cfg.train.get("warmup_ratio") else 0
    _made("train.scheduler", scheduler, lambda: build_lr_scheduler(scheduler, optimizer))


def _made(key: str, config: DictConfig, make: Callable[[], Any]) -> Any:
    try:
        return make()
    # The constructors check their settings with exceptions of any type.
    except Exception as error:
        text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise UserError(
            f"{key}: {_name_of(config)} cannot be made of these settings: {text}"
        ) from error


def _name_of(config: Any) -> str:
    """Name of the class or function that a config node calls; "" where it calls none."""
    target = config.get("_target_", "") if isinstance(config, DictConfig) else ""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rpartition(".")[2]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(node: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Each number below a node with its key; what an interpolation points at has its own."""
    if isinstance(node, DictConfig | ListConfig):
        for name in node if isinstance(node, DictConfig) else range(len(node)):
            if not (OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)):
                yield from _numbers(node[name], f"{key}.{name}".lstrip("."))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield key, node
