"""Finds what is wrong with a run before it starts, on every rank, and says it once.

LiBai finds most of this by an assertion deep inside, minutes later, or not at all: it clamps
parallel sizes to the number of processes and divides by zero on data without a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import agree, require_same
from oneflow_accel.errors import UserError, did_you_mean

import oneflow as flow
from libai.config import try_get_key
from libai.optim import build_optimizer
from libai.scheduler import build_lr_scheduler
from omegaconf import DictConfig

from flow_train.metrics.log import require_loggers
from libai_projects.command import check_files
from libai_projects.command.arguments import Options
from libai_projects.command.config import check_keys, name_of
from libai_projects.models import families
from libai_projects.weights import monarch

# The results that an evaluation gives for each split.
_RESULTS = ("lm_loss_PPL", "lm_loss", "lm_loss_tokens", "lm_loss_accuracy", "order_accuracy")


@dataclass(frozen=True)
class Layout:
    """Processes along each way of sharing the work; their product is the world size."""

    data: int
    tensor: int
    pipeline: int


def check_run(cfg: DictConfig, options: Options) -> None:
    """Check a run and complete its batch sizes; every process calls it. The UserError lists
    everything that is wrong, each with what to do, and is the same on all ranks."""
    problems: list[str] = []

    def note(check: Callable[[], object]) -> bool:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
            return False
        return True

    world_size = distributed.world_size()
    layouts: list[Layout] = []
    if note(lambda: check_keys(cfg)):
        if note(lambda: layouts.append(check_layout(cfg, world_size))):
            note(lambda: check_model(cfg, layouts[0]))
            note(lambda: complete_batch_sizes(cfg, layouts[0]))
        note(lambda: check_steps(cfg))
        note(lambda: check_evaluation(cfg))
        note(lambda: check_optimizer(cfg))
        note(lambda: require_loggers(cfg.train.get("logger") or {}))
        check_files.check_all(cfg, options, note)
    # A file may be missing on one node only, or be another one there.
    agree(problems)
    require_same(check_files.contents(cfg))


def check_layout(cfg: DictConfig, world_size: int) -> Layout:
    """The parallel layout of a config; a UserError where it does not fit `world_size` processes."""
    sizes = cfg.train.dist
    tensor, pipeline = (sizes.get(f"{way}_parallel_size") or 1 for way in ("tensor", "pipeline"))
    data, rest = divmod(world_size, tensor * pipeline)
    if rest:
        raise UserError(
            f"train.dist: tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline} needs "
            f"a multiple of {tensor * pipeline} processes, and there are {world_size}; start "
            f"{tensor * pipeline} (the number after the config in train.sh) or change the sizes"
        )
    # LiBai's configs set 1 by default, so a 1 is not a decision of the user.
    given = sizes.get("data_parallel_size")
    if given not in (None, 1, data):
        raise UserError(
            f"train.dist.data_parallel_size={given}: {world_size} processes / "
            f"(tensor {tensor} x pipeline {pipeline}) leave {data}; leave the key out, or start "
            f"{given * tensor * pipeline} processes"
        )
    return Layout(data, tensor, pipeline)


def check_model(cfg: DictConfig, layout: Layout) -> None:
    """Check that the layout divides the model, and that sequences fit its positions."""
    model = try_get_key(cfg, "model.cfg", default=None)
    if model is None:
        return
    families.check_model(try_get_key(cfg, "model._target_", default=None), model, layout.tensor)
    problems = [*_stages(cfg, layout.pipeline), *_sequences(cfg)]
    if problems:
        raise UserError("\n  - ".join(problems))


def _stages(cfg: DictConfig, count: int) -> Iterator[str]:
    """What is wrong with how so many stages share the layers."""
    layers = cfg.model.cfg.get("num_layers")
    if count == 1 or not layers:
        return
    stage_of_layer = try_get_key(cfg, "train.dist.custom_pipeline_stage_id", default=None)
    if stage_of_layer is not None:
        stages = list(stage_of_layer)
        if len(stages) != layers or sorted(set(stages)) != list(range(count)):
            yield (
                f"train.dist.custom_pipeline_stage_id={stages}: it names the stage of each of the "
                f"{layers} layers, there are {len(stages)} entries, and each of the stages 0 to "
                f"{count - 1} needs a layer"
            )
        elif stages != sorted(stages):
            yield f"train.dist.custom_pipeline_stage_id={stages}: stages come in rising order"
        return
    if layers % count:
        yield (
            f"train.dist.pipeline_parallel_size={count} does not divide "
            f"model.cfg.num_layers={layers}; take a divisor, or say which stage each layer goes to "
            "with train.dist.custom_pipeline_stage_id=[...]"
        )
    counted = try_get_key(cfg, "train.dist.pipeline_num_layers", default=None)
    if counted not in (None, layers):
        yield (
            f"train.dist.pipeline_num_layers={counted}, but model.cfg.num_layers={layers}; "
            "leave the former out"
        )


def _sequences(cfg: DictConfig) -> Iterator[str]:
    positions = cfg.model.cfg.get("max_seq_length")
    for key, dataset in check_files.datasets(cfg):
        length = dataset.get("max_seq_length")
        if length and positions and length > positions:
            yield (
                f"{key}.max_seq_length={length}: the model has "
                f"model.cfg.max_seq_length={positions} positions; shorten one or raise the other"
            )


def complete_batch_sizes(cfg: DictConfig, layout: Layout) -> None:
    """Fill in the batch size that is left out: global = micro x data parallel x accumulation."""
    train, names = (
        cfg.train,
        ("global_batch_size", "train_micro_batch_size", "num_accumulation_steps"),
    )
    total, micro, steps = (train.get(name) for name in names)
    rule = (
        "global_batch_size = train_micro_batch_size x data parallel processes "
        f"({layout.data} here) x num_accumulation_steps"
    )
    if micro is None and total is None:
        raise UserError(f"set train.train_micro_batch_size or train.global_batch_size: {rule}")
    if total is not None:
        known = (micro or 1) * layout.data * (steps or 1)
        if total != known if micro and steps else total % known:
            given = ", ".join(f"{name}={train[name]}" for name in names if train.get(name))
            raise UserError(
                f"train: {given} contradict each other: {rule}; set one of them to null"
            )
        micro = micro or total // known
        steps = total // (layout.data * micro)
    train.train_micro_batch_size, train.num_accumulation_steps = micro, steps or 1
    train.global_batch_size = micro * layout.data * (steps or 1)


def check_steps(cfg: DictConfig) -> None:
    """Check that there is something to train, and that ZeRO and activation checkpointing have
    nn.Graph."""
    share = try_get_key(cfg, "train.sparse_to_dense.fraction", default=None)
    if share is not None and not monarch.layers(try_get_key(cfg, "model.cfg", default={})):
        keys = " or ".join(f"model.cfg.{key}=monarch" for key in monarch.KEYS)
        raise UserError(
            f"train.sparse_to_dense.fraction={share}, but all layers are dense; give {keys}"
        )
    if not (cfg.train.get("train_iter") or cfg.train.get("train_epoch")):
        raise UserError("nothing to train: train.train_iter and train.train_epoch are 0")
    for group in ("zero_optimization", "activation_checkpoint"):
        options = cfg.train.get(group) or {}
        if not options.get("enabled"):
            continue
        if not cfg.graph.enabled:
            raise UserError(f"train.{group}.enabled=true needs nn.Graph: graph.enabled=true")
        if options.get("stage") == 0:
            raise UserError(f"train.{group}.stage=0 is not 1, 2 or 3")


def check_evaluation(cfg: DictConfig) -> None:
    """Check that what the best model and early stopping go by is a result of the evaluation."""
    evaluation = cfg.train.get("evaluation")
    if not evaluation or not evaluation.enabled:
        return
    metric = evaluation.get("eval_metric")
    # Only the results of PPLEvaluator are known before the run.
    if metric is None or name_of(evaluation.get("evaluator")) != "PPLEvaluator":
        return
    tests = len(try_get_key(cfg, "dataloader.test", default=None) or [])
    splits = ["validation", "test", *(f"test_{number}" for number in range(tests))]
    split, _, name = str(metric).rpartition("/")
    if name not in _RESULTS or (split and split not in splits):
        known = [f"{split}/{result}" for split in splits for result in _RESULTS]
        hint = did_you_mean(str(metric), known, "take validation/lm_loss_PPL")
        raise UserError(
            f"train.evaluation.eval_metric={metric} is not a result of the evaluation; {hint}"
        )


def check_optimizer(cfg: DictConfig) -> None:
    """Check that the optimizer and the schedule can be made, on a parameter of one element."""
    optim = cfg.get("optim")
    if optim is None:
        return
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
            f"{key}: {name_of(config)} cannot be made of these settings: {text}"
        ) from error
