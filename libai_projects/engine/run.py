"""A run of a LiBai config on flow_train's loop, and its evaluation without training."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.backends import Backend

import numpy as np
from libai.config import try_get_key
from omegaconf import DictConfig, OmegaConf
from oneflow import nn

from flow_train.checkpoint.folders import (
    AUTO_RESUME,
    newest_checkpoint,
)
from flow_train.checkpoint.whole import Spread
from flow_train.files import replace_file
from flow_train.hooks import EarlyStopping, Hook, MacsLog, ModelCheckpoint, ParamsLog, Run
from flow_train.metrics.profile import ProfileSteps
from flow_train.options import Position, TrainerOptions
from flow_train.session import Data, Recipe, RunIdentity, Session
from libai_projects.command.adapt import amp_precision
from libai_projects.command.check_files import weights_format
from libai_projects.command.output import CONFIG_BACKUP, METRICS_NAME, MetricsJson, read_backup
from libai_projects.engine import parts
from libai_projects.engine.steps import LibaiEagerStep, LibaiGraphStep
from libai_projects.engine.task import THEIR_SPLITS, metric_of, replicas
from libai_projects.models.families import table_of
from libai_projects.weights import load, load_into, old_runs
from libai_projects.weights.loading import load_checkpoint
from libai_projects.weights.monarch import KEYS, in_libai_layout
from monarch_flow.engine.sparse_to_dense import share_of, tell
from monarch_flow.projection import densify_training_state, structured_layers

RESULT_NAME = "evaluation.json"
logger = logging.getLogger("libai_projects")


def train(cfg: DictConfig, backend: Backend, *, resume: bool, profile: int | None = None) -> Any:
    """Train a model of a checked config to the end; errors and ends are those of `Session.fit`.
    With `profile` so many steps are profiled, and nothing is kept but that. Returns what holds the
    graphs."""
    settings, evaluation = cfg.train, cfg.train.evaluation
    folder = Path(settings.output_dir)
    backup = read_backup(folder / CONFIG_BACKUP)
    identity = RunIdentity(
        _model_name(cfg), backup, phase=lambda model: _phase(cfg, model), run=folder.name
    )
    # One process's disk may have what another's lacks.
    by_new = any(distributed.all_gather_json(newest_checkpoint(folder) is not None))
    with Session(
        folder,
        identity,
        AUTO_RESUME if resume else None,
        backend=backend,
        seed=settings.seed,
        seed_option="train.seed=",
        resume_option="--resume",
        keeps=profile is None,
        keep_last=try_get_key(settings, "checkpointer.max_to_keep", default=None),
        loggers=OmegaConf.to_container(settings.get("logger") or OmegaConf.create({})),
        more_loggers=[lambda: MetricsJson(folder / METRICS_NAME)],
        found=old_runs.read(folder, settings.global_batch_size) if resume and not by_new else None,
        lazily=True,
    ) as run:
        resumed = run.resumed
        state = {} if resumed is None else resumed.state
        done, kept = run.first_step, state.get("train_step", {})
        consumed = kept.get("consumed_samples", done * settings.global_batch_size)
        loaders = parts.make_loaders(cfg, parts.make_tokenizer(cfg), consumed)
        parts.settle_length(cfg, loaders.train)
        if state.get("phase") == "dense":
            parts.make_dense(cfg)
        model = parts.make_model(cfg)
        if resumed is not None:
            load_checkpoint(model, resumed)
        elif settings.get("load_weight"):
            parts.load_weights(model, settings.load_weight)
        logger.info(describe(cfg, model))
        task, maker = parts.make_task(cfg), parts.maker(cfg)
        graph, made = bool(cfg.graph.enabled), []
        accumulate = 1 if graph else settings.num_accumulation_steps
        batch = settings.train_micro_batch_size * (settings.num_accumulation_steps if graph else 1)
        kind = LibaiGraphStep if graph else LibaiEagerStep

        def make_step(model: nn.Module, position: Position) -> Any:
            precision = amp_precision(cfg)
            size = None if graph else batch
            step = kind(model, backend, maker, task, precision=precision, part_size=size)
            step.samples = consumed
            if isinstance(step, LibaiGraphStep):
                step.is_resumed = resumed is not None and not made
            made[:] = [step]
            return step

        batches = settings.train_iter * accumulate
        data = loaders.evaluated if evaluation.enabled and profile is None else {}
        limit = None if data else 0
        ended = done >= settings.train_iter
        return run.fit(
            model,
            task,
            Data(
                parts.Loader(loaders.train, batches, batch, replicas()), data.pop("val", None), data
            ),
            Recipe(
                None,
                # The rate of the step to come, whatever the schedule.
                lambda step: made[0].rate,
                TrainerOptions(
                    max_epochs=1,
                    min_epochs=0,
                    accumulate=accumulate,
                    precision=amp_precision(cfg),
                    graph=graph,
                    log_every=settings.log_period,
                    limit_val=limit,
                    val_every_steps=evaluation.eval_period if evaluation.eval_period > 0 else None,
                    per_step=True,
                    by_steps=True,
                    way_on="go on with --resume",
                    way_to_more="to go on, raise train.train_iter; --eval-only evaluates",
                ),
                _hooks(cfg, profile),
                make_step=make_step,
            ),
            start=Position(1, 0, done) if ended else Position(0, done * accumulate, done),
        )


def _model_name(cfg: DictConfig) -> str:
    target = try_get_key(cfg, "model._target_")
    return (target if isinstance(target, str) else target.__name__).rpartition(".")[2]


def _phase(cfg: DictConfig, model: nn.Module) -> str | None:
    if try_get_key(cfg, "train.sparse_to_dense.fraction", default=None) is None:
        return None
    return "structured" if structured_layers(model) else "dense"


def _hooks(cfg: DictConfig, profile: int | None) -> dict[str, Hook]:
    from flow_train.config import keys  # late: see there

    train, evaluation = cfg.train, cfg.train.evaluation
    if profile is not None:
        return {"profile": ProfileSteps(profile, Path(train.output_dir))}
    # Of what `libai_projects.compare` makes its table.
    trained = keys.ParamsLog(total_params_log=False, non_trainable_params_log=False)
    hooks: dict[str, Hook] = {"macs_log": MacsLog(), "params_log": ParamsLog(trained)}
    fraction = try_get_key(cfg, "train.sparse_to_dense.fraction", default=None)
    if fraction is not None:
        hooks["sparse_to_dense"] = SparseToDense(fraction, cfg)
    better = {
        "monitor": metric_of(evaluation.get("eval_metric", "Acc@1")),
        "mode": evaluation.get("eval_mode", "max"),
    }
    if evaluation.enabled and (evaluation.get("patience") or train.get("max_minutes")):
        hooks["early_stopping"] = EarlyStopping(
            keys.EarlyStopping(
                **better,
                patience=evaluation.get("patience") or sys.maxsize,
                max_minutes=train.get("max_minutes"),
            )
        )
    hooks["model_checkpoint"] = BestAndNewest(
        keys.ModelCheckpoint(**better, every_n_train_steps=train.checkpointer.period)
    )
    return hooks


class BestAndNewest(ModelCheckpoint):
    """Goes on where an evaluator does not give what train.evaluation.eval_metric names."""

    def on_validation_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        if self.monitor in metrics:
            super().on_validation_end(trainer, metrics)
        else:
            logger.warning(
                "train.evaluation.eval_metric (%s) is not a result of the evaluation, so no best "
                "model is kept; results are %s",
                self.monitor,
                ", ".join(metrics),
            )


class SparseToDense(Hook):
    """Makes the structured layers of the model dense before the iteration that follows `fraction`
    (0 to 1) of the run; see `monarch_flow.engine.sparse_to_dense`.

    metrics.jsonl gets the loss of one validation batch as "loss_before" and "loss_after", under
    the split "switch".
    """

    def __init__(self, fraction: float, cfg: DictConfig) -> None:
        self._fraction, self._cfg = fraction, cfg

    def _first(self, trainer: Run) -> int:
        return share_of(self._fraction, self._cfg.train.train_iter)

    def outlook(self, trainer: Run) -> str:
        if not structured_layers(trainer.model):
            return ""
        first = self._first(trainer)
        if first >= trainer.last_step:
            return "the structured layers never become dense: the run ends before"
        return f"the structured layers become dense from iteration {first + 1} on"

    def on_step_start(self, trainer: Run) -> None:
        if trainer.position.step >= self._first(trainer) and structured_layers(trainer.model):
            self._switch(trainer)

    def _switch(self, trainer: Run) -> None:
        cfg, layers, old = self._cfg, structured_layers(trainer.model), trainer.train_step
        before, state = self._losses(trainer), old.state()
        arrays, moments = (_gathered(each) for each in old.arrays())
        graph = {n: moments.pop(n) for n in list(moments) if n.startswith("graph/")}
        if distributed.is_main():
            dense = densify_training_state(arrays, moments, layers)
            heads = cfg.model.cfg.num_attention_heads
            arrays, moments = (
                in_libai_layout(a, layers, heads) for a in (dense.model, dense.optimizer)
            )
        parts.make_dense(cfg)
        trainer.use_model(parts.make_model(cfg))
        trainer.model.train()
        load_into(trainer.model, arrays, table=table_of(trainer.model))
        moments |= graph
        names = on_rank_0(lambda: list(moments))
        trainer.train_step.load_optimizer(Spread(moments, names), trainer.position.step)
        trainer.train_step.load_state(state)
        for hook in trainer.hooks.values():
            hook.on_model_replaced(trainer, {})
        since = f"iteration {trainer.position.step + 1}"
        tell(trainer, since, len(layers), before, self._losses(trainer))

    def _losses(self, trainer: Run) -> dict[str, float]:
        """The mean loss of a batch of the first split to evaluate; {} without one."""
        loaders = [trainer.data.val, *trainer.data.others.values()]
        loader = next((each for each in loaders if each is not None), None)
        if loader is None:
            return {}
        model = trainer.train_step.evaluated_model()
        found = trainer.task.evaluate(model, loader, trainer.backend, max_batches=1).as_logged()
        return {"loss": found["loss"]} if "loss" in found else {}


def _gathered(arrays: Any) -> dict[str, np.ndarray]:
    """All arrays on the main process, none on others; a collective call."""
    if distributed.is_main():
        return {name: arrays[name] for name in arrays}
    arrays.drain()
    return {}


def weights_to_evaluate(cfg: DictConfig) -> str:
    """train.load_weight, else the newest checkpoint in train.output_dir."""
    if cfg.train.load_weight:
        return str(cfg.train.load_weight)
    folder = Path(cfg.train.output_dir)
    return on_rank_0(lambda: str(newest_checkpoint(folder) or old_runs.last(folder)))


def evaluate(cfg: DictConfig, backend: Backend, weights: str) -> object:
    """Evaluate on the validation and test splits and on dataloader.test; every process calls it.

    Returns what was evaluated, the graph in graph mode: the caller decides when it is freed. Raises
    UserError where the weights are damaged or those of another model.
    """
    loaders = parts.make_loaders(cfg, parts.make_tokenizer(cfg))
    if try_get_key(cfg, "train.sparse_to_dense.fraction", default=None) is not None:
        table = table_of(try_get_key(cfg, "model._target_"))
        _, found = load(weights, on_rank_0(lambda: weights_format(weights)), table=table)
        if not any(key in found for key in KEYS):
            parts.make_dense(cfg)
    model = parts.make_model(cfg)
    parts.load_weights(model, weights)
    evaluated: Any = parts.make_graph(cfg, model, is_train=False) if cfg.graph.enabled else model
    task = parts.make_task(cfg)
    results = {}
    for split, loader in loaders.evaluated.items():
        name = THEIR_SPLITS.get(split, split)
        found = task.evaluate(evaluated, loader, backend)
        results |= {f"{name}/{key}": value for key, value in found.values.items()}
    if distributed.is_main():
        text = json.dumps({"weights": weights, **results}, indent=1, sort_keys=True)
        replace_file(Path(cfg.train.output_dir) / RESULT_NAME, text.encode())
        for name, value in results.items():
            logger.info("%s: %.6g", name, value)
    return evaluated


def describe(cfg: DictConfig, model: nn.Module) -> str:
    """The model, and how it is laid out on the processes."""
    sizes, weights = cfg.train.dist, sum(weight.numel() for weight in model.parameters())
    return (
        f"{type(model).__name__} of {weights:,} weights: data {replicas()} x tensor "
        f"{sizes.tensor_parallel_size} x pipeline "
        f"{sizes.pipeline_parallel_size} processes, batch {cfg.train.global_batch_size} = "
        f"{cfg.train.train_micro_batch_size} x {replicas()} x "
        f"{cfg.train.num_accumulation_steps} accumulation steps"
    )
