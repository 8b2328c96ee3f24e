"""What a run logs besides its losses: rates, times, norms, and the size of its model."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.hooks.base import Hook
from flow_train.metrics.macs import count_macs, count_parameters

if TYPE_CHECKING:
    from flow_train.loop import Trainer

logger = logging.getLogger("oneflow_accel")


class ParamsLog(Hook):
    """Logs `params_total`, `params_trainable` and `params_not_trainable` when a run begins, and
    again when its layers have become dense."""

    def __init__(
        self,
        total_params_log: bool = True,
        trainable_params_log: bool = True,
        non_trainable_params_log: bool = True,
    ) -> None:
        self._total = total_params_log
        self._trainable = trainable_params_log
        self._fixed = non_trainable_params_log

    def on_fit_start(self, trainer: Trainer) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Trainer, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        count = count_parameters(trainer.model)
        values = {}
        if self._total:
            values["params_total"] = count.total
        if self._trainable:
            values["params_trainable"] = count.trainable
        if self._fixed:
            values["params_not_trainable"] = count.total - count.trainable
        trainer.log_hyperparameters(values)


class MacsLog(Hook):
    """Logs `gmacs`, 10^9 multiply-accumulates per image, structured layers counted as what they
    are, when a run begins and when its layers have become dense."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Trainer, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        channels, *size = trainer.image_shape
        # Count on the local copy: a model of global tensors takes neither hooks nor this pass.
        model = trainer.train_step.evaluated_model()
        trainer.log_hyperparameters({"gmacs": count_macs(model, size, channels) / 1e9})


class LearningRateMonitor(Hook):
    """Logs `lr-AdamW/pg1`, `lr-AdamW/pg2` ... with every log line ("step") or once per "epoch";
    `lr` itself is on every log line anyway. UserError for another interval."""

    def __init__(self, logging_interval: str = "step") -> None:
        if logging_interval not in ("step", "epoch"):
            raise UserError(
                f"callbacks.learning_rate_monitor.logging_interval is {logging_interval!r}; it can "
                "be step or epoch"
            )
        self._per_step = logging_interval == "step"

    def on_step_end(self, trainer: Trainer) -> None:
        if self._per_step and trainer.is_log_step:
            trainer.log(self._rates(trainer))

    def on_epoch_end(self, trainer: Trainer) -> None:
        if not self._per_step:
            trainer.log_now(self._rates(trainer), split="lr")

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        optimizer = trainer.train_step.optimizer
        name = type(optimizer).__name__
        return {
            f"lr-{name}/pg{number}": trainer.last_lr * group.options.get("lr_scale", 1.0)
            for number, group in enumerate(optimizer.param_groups, start=1)
        }


class SpeedMonitor(Hook):
    """Logs `time/intra_step (ms)`, from the images to the end of the step; `time/inter_step (ms)`,
    from there to the next images; `time/epoch (s)`. `verbose` prints the first, too.

    It is the wall time of the host in process 0, which runs ahead of an asynchronous device: a
    single step's figures mean little there, sums over many do.
    """

    def __init__(
        self,
        intra_step_time: bool = True,
        inter_step_time: bool = True,
        epoch_time: bool = True,
        verbose: bool = False,
    ) -> None:
        self._intra = intra_step_time
        self._inter = inter_step_time
        self._epoch = epoch_time
        self._verbose = verbose
        self._epoch_began = self._step_began = 0.0
        self._step_ended: float | None = None
        self._waited: float | None = None

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._epoch_began = time.perf_counter()
        self._step_ended = None

    def on_evaluation_start(self, trainer: Trainer) -> None:
        # The next step waits for the evaluation, not for its data.
        self._step_ended = None

    def on_step_start(self, trainer: Trainer) -> None:
        self._step_began = time.perf_counter()
        ended = self._step_ended
        self._waited = None if ended is None else self._step_began - ended

    def on_step_end(self, trainer: Trainer) -> None:
        self._step_ended = time.perf_counter()
        if not trainer.is_log_step or not distributed.is_main():
            return
        seconds = self._step_ended - self._step_began
        if self._intra:
            trainer.log({"time/intra_step (ms)": 1e3 * seconds})
        if self._inter and self._waited is not None:
            trainer.log({"time/inter_step (ms)": 1e3 * self._waited})
        if self._verbose:
            logger.info("step %d took %.1f ms", trainer.position.step, 1e3 * seconds)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self._epoch:
            seconds = time.perf_counter() - self._epoch_began
            trainer.log_now({"time/epoch (s)": seconds}, split="time")


class NormMonitor(Hook):
    """On log steps, before gradients are clipped: for each trainable parameter
    `stats/NAME_max` and `_mean` of |weight|, `stats/NAME_grad_max` and `_grad_mean` of |gradient|;
    and over all of them the sums `total_param_l1_norm` and `total_grad_l1_norm`.

    Gradients are those of the whole batch, on all processes together. Under nn.Graph they take an
    eager pass of their own, on log steps, with memory for its activations.

    Args:
        layer_norm_only: single parameters of LayerNorm and Embedding only; the sums are over all.
    """

    def __init__(self, layer_norm_only: bool = False) -> None:
        self._layer_norm_only = layer_norm_only

    def before_update(self, trainer: Trainer) -> None:
        if not trainer.is_log_step:
            return
        shown = self._shown(trainer.model)
        names, figures = [], []
        totals = [flow.zeros(()), flow.zeros(())]
        parameters = dict(trainer.model.named_parameters())
        gradients = trainer.train_step.gradients()
        with flow.no_grad():
            for name, gradient in gradients.items():
                parameter = distributed.local_value(parameters[name])
                for kind, (suffix, value) in enumerate((("", parameter), ("_grad", gradient))):
                    size = value.detach().abs()
                    totals[kind] = totals[kind].to(size.device) + size.sum()
                    if name in shown:
                        names += [f"stats/{name}{suffix}_max", f"stats/{name}{suffix}_mean"]
                        figures += [size.max(), size.mean()]
            names += ["total_param_l1_norm", "total_grad_l1_norm"]
            stacked = flow.stack([figure.reshape(()) for figure in [*figures, *totals]])
        if distributed.is_main():
            trainer.log(dict(zip(names, stacked.numpy().tolist(), strict=True)))

    def _shown(self, model: nn.Module) -> set[str]:
        kinds = (nn.LayerNorm, nn.Embedding) if self._layer_norm_only else (nn.Module,)
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            if isinstance(module, kinds)
            for name, _ in module.named_parameters(recurse=False)
        }
