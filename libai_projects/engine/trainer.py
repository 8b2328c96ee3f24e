"""LiBai's trainer with our tokenizer, weights, writers and seeding."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import distributed

import oneflow as flow
from libai.config import try_get_key
from libai.engine import DefaultTrainer
from libai.engine.hooks import PeriodicWriter
from libai.utils.events import EventWriter
from omegaconf import DictConfig, ListConfig

from libai_projects import weights
from libai_projects.engine import throughput, writers
from libai_projects.engine.check_files import weights_format
from libai_projects.engine.stopping import EarlyStop, RunEndedEarlyError

logger = logging.getLogger("libai_projects")


class Trainer(DefaultTrainer):
    """Trains a model of a LiBai config.

    Args:
        cfg: the whole config, checked (`checks.check_run`).
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.backend = oneflow_accel.current_backend()
        super().__init__(cfg)
        if cfg.graph.enabled and self.start_iter:
            # A graph draws its masks from the seed it is compiled with, at its first run. A resumed
            # one must not draw again those that the run began with.
            self.backend.manual_seed(step_seed(cfg.train.seed, self.start_iter))
            logger.info(
                "resumed under nn.Graph: with dropout the losses are not those of a run in one go, "
                "as the masks start anew; without it, or with graph.enabled=false, they are"
            )
        logger.info(self._describe())

    def _describe(self) -> str:
        train, sizes = self.cfg.train, self.cfg.train.dist
        weights = sum(weight.numel() for weight in self.model.parameters())
        mode = "nn.Graph" if self.cfg.graph.enabled else "eager"
        return (
            f"{type(self.model).__name__} of {weights:,} weights on {sizes.device_type}, {mode}: "
            f"data {sizes.data_parallel_size} x tensor {sizes.tensor_parallel_size} x pipeline "
            f"{sizes.pipeline_parallel_size} processes, batch {train.global_batch_size} = "
            f"{train.train_micro_batch_size} x {sizes.data_parallel_size} x "
            f"{train.num_accumulation_steps} accumulation steps, {self.max_iter} iterations from "
            f"{self.start_iter} on"
        )

    def train(self) -> None:
        """Train to the last iteration, or until `EarlyStop` ends the run."""
        if self.start_iter >= self.max_iter:
            # No error: whatever restarts a run until it succeeds must see that it has.
            logger.info(
                "nothing to train: %s has all %d iterations; to go on, raise train.train_iter; "
                "--eval-only evaluates",
                self.cfg.train.output_dir,
                self.max_iter,
            )
            return
        try:
            super().train()
        except RunEndedEarlyError as end:
            logger.info("stopped after %d iterations: %s", self.iter + 1, end)

    @classmethod
    def build_optimizer(cls, cfg: DictConfig, model: flow.nn.Module) -> flow.optim.Optimizer:
        """The optimizer; its settings are plain values, which a checkpoint can hold."""
        optimizer = super().build_optimizer(cfg, model)
        for group in optimizer.param_groups:
            for name, value in group.options.items():
                if isinstance(value, ListConfig):
                    group.options[name] = tuple(value)
        return optimizer

    def resume_or_load(self, resume: bool = True) -> None:
        """Take up the last checkpoint, or only weights (train.load_weight), or neither."""
        if not resume and self.cfg.train.load_weight:
            load_weights(self.model, self.cfg.train.load_weight)
            return
        super().resume_or_load(resume)

    def build_hooks(self) -> list[Any]:
        """LiBai's hooks, except that the writers also write what the last evaluation finds."""
        hooks = [
            _FinalWriter(hook._writers, hook._period) if type(hook) is PeriodicWriter else hook
            for hook in super().build_hooks()
        ]
        train = self.cfg.train
        patience = try_get_key(train, "evaluation.patience", default=None)
        minutes = train.get("max_minutes")
        if train.evaluation.enabled and (patience or minutes):
            metric = train.evaluation.eval_metric
            hooks.append(
                EarlyStop(
                    train.evaluation.eval_period,
                    # As the best model has it.
                    metric if "/" in metric else f"validation/{metric}",
                    lower_is_better=train.evaluation.eval_mode == "min",
                    patience=patience,
                    minutes=minutes,
                )
            )
        return hooks

    def build_writers(self) -> list[EventWriter]:
        """What the main process writes; the picture comes last, for it reads metrics.json."""
        output = Path(self.cfg.train.output_dir)
        metrics = output / writers.METRICS_NAME
        speed = throughput.of_run(
            self.cfg, self.backend, distributed.world_size(), self.global_batch_size
        )
        result: list[EventWriter] = [
            writers.ConsoleWriter(self.max_iter, speed),
            writers.JSONWriter(metrics, self.start_iter),
        ]
        try:
            result.append(writers.TensorBoardWriter(output / "tensorboard", self.start_iter))
        except ImportError as error:
            logger.info("no TensorBoard log (%s); metrics are in %s", error, metrics)
        return [*result, writers.CurveWriter(metrics)]

    def run_step(self) -> None:
        """One iteration; in eager mode its dropout masks depend on the seed and its number only."""
        if not self.cfg.graph.enabled:
            self.backend.manual_seed(step_seed(self.cfg.train.seed, self.iter))
        # LiBai would count the loss of a step to the one before, unlike its time and learning rate.
        self.storage.iter = self.iter + 1
        super().run_step()


class _FinalWriter(PeriodicWriter):
    """Writes once more when the run ends: hooks before it have evaluated then."""

    def after_train(self) -> None:
        for writer in self._writers:
            writer.write()
        super().after_train()


def step_seed(seed: int, iteration: int) -> int:
    """A 63-bit seed for one iteration, so that a resumed run draws what the whole one drew."""
    digest = hashlib.sha256(f"libai_projects {seed} iteration {iteration}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def load_weights(model: flow.nn.Module, path: str) -> None:
    """Load weights into a model of any layout.

    Args:
        model: a global model; its own vocabulary size is kept, rows are padded or dropped.
        path: LiBai checkpoint (or its model directory) or Hugging Face directory.

    Raises:
        UserError: the directory is neither, is damaged, or holds another model.
    """
    state, _ = weights.load(path, weights_format(path))
    weights.load_into(model, state)
    logger.info("loaded the weights of %s", path)
