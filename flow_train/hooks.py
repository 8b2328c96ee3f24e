"""What watches a run or changes it, each hook switched on by its key in the configuration.

`Hook` has the moments at which the loop calls them; `build_hooks` has their order. The options of a
hook are a group of `config/keys.py`, which has their defaults and ranges.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from oneflow_accel import agree, distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.metrics.macs import count_parameters
from flow_train.optim import EMA_PREFIX, ExponentialMovingAverage, averages_in
from flow_train.options import Calendar, Position, TrainerOptions
from flow_train.steps.eager import TrainStep, broadcast_buffers
from flow_train.task import Evaluation

if TYPE_CHECKING:
    from flow_train.config import keys  # see there

logger = logging.getLogger("oneflow_accel")


class Run(Protocol):
    """What a hook may ask of the run that calls it, and tell it: `loop.Trainer`, where the
    attributes are described."""

    model: nn.Module
    task: Any
    data: Any
    backend: Any
    train_step: TrainStep
    position: Position
    options: TrainerOptions
    calendar: Calendar
    hooks: dict[str, Hook]
    is_log_step: bool
    should_stop: bool
    last_lr: float

    @property
    def last_step(self) -> int: ...
    @property
    def may_stop(self) -> bool: ...
    @property
    def pause_follows(self) -> bool:
        """Whether a validation within an epoch follows the step just done, or the end of a run
        whose data have no epochs."""

    def use_model(self, model: nn.Module) -> None: ...
    def evaluate(self, loader: Any) -> Evaluation: ...
    def log(self, values: Mapping[str, float]) -> None:
        """With the next log line."""

    def log_now(self, values: Mapping[str, float], *, split: str) -> None: ...
    def log_hyperparameters(self, values: Mapping[str, float]) -> None: ...
    def steps_on_disk(self) -> set[int]: ...
    def save_checkpoint(self, *, best: bool = False, keep: Collection[int] = ()) -> None: ...


class Hook:
    """Does nothing at any time; a subclass overrides what it needs.

    Every process calls all hooks at the same moments. Values for the next log line go to
    `trainer.log`; a step is a log step if `trainer.is_log_step` says so.
    """

    def outlook(self, trainer: Run) -> str:
        """What the hook will change in the run, for the line that it begins with; "" for
        nothing."""
        return ""

    def on_fit_start(self, trainer: Run) -> None:
        """Before the first step; a resumed run has its state by now."""

    def on_epoch_start(self, trainer: Run) -> None:
        """Before the epoch's first batch is waited for."""

    def on_step_start(self, trainer: Run) -> None:
        """The step's batch is here."""

    def before_update(self, trainer: Run) -> None:
        """Before the parameters are updated: `trainer.train_step.named_gradients()` are the step's,
        not clipped yet. Under nn.Graph asking for them costs a forward and a backward pass."""

    def on_step_end(self, trainer: Run) -> None:
        """The parameters have been updated and `trainer.position` counts the step."""

    def evaluation_weights(self, trainer: Run, model: nn.Module) -> AbstractContextManager[None]:
        """Entered around each evaluation: may give `model` other weights meanwhile."""
        return nullcontext()

    def on_evaluation_start(self, trainer: Run) -> None:
        """Before validation or test."""

    def on_validation_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        """`metrics` as "val/loss", and others of the task, such as "val/acc", in percent."""

    def on_epoch_end(self, trainer: Run) -> None:
        """After validation; `trainer.position` is at the next epoch's beginning."""

    def on_pause(self, trainer: Run) -> None:
        """After a validation within an epoch."""

    def on_interrupt(self, trainer: Run) -> None:
        """The run stops between two steps: it was told to, or has done its steps."""

    def on_model_replaced(self, trainer: Run, arrays: Mapping[str, np.ndarray]) -> None:
        """`trainer.model` is another module now; `arrays` is what the hook's `arrays` would give
        for it."""

    def on_fit_end(self, trainer: Run) -> None:
        """After the last step and validation."""

    def state(self) -> dict[str, Any]:
        return {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for the checkpoint, by names of the hook's own. A collective call."""
        return {}

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` gave, and from the checkpoint's arrays, which are those of all
        hooks and of the optimizer. Called after `on_fit_start`."""


class ParamsLog(Hook):
    """Logs `params_total`, `params_trainable` and `params_not_trainable` when a run begins, and
    again when its layers have become dense."""

    def __init__(self, options: keys.ParamsLog) -> None:
        self._options = options

    def on_fit_start(self, trainer: Run) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Run, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Run) -> None:
        count = count_parameters(trainer.model, trainer.train_step.layout)
        values = {}
        if self._options.total_params_log:
            values["params_total"] = count.total
        if self._options.trainable_params_log:
            values["params_trainable"] = count.trainable
        if self._options.non_trainable_params_log:
            values["params_not_trainable"] = count.total - count.trainable
        trainer.log_hyperparameters(values)


class MacsLog(Hook):
    """Logs `gmacs`, 10^9 multiply-accumulates per image or token, structured layers counted as what
    they are, when a run begins and when its layers have become dense."""

    def on_fit_start(self, trainer: Run) -> None:
        self._log(trainer)

    def on_model_replaced(self, trainer: Run, arrays: object) -> None:
        self._log(trainer)

    def _log(self, trainer: Run) -> None:
        # Count on the local copy: a model of global tensors takes neither hooks nor this pass.
        model = trainer.train_step.evaluated_model()
        trainer.log_hyperparameters({"gmacs": trainer.task.macs(model) / 1e9})


class LearningRateMonitor(Hook):
    """Logs `lr-AdamW/pg1`, `lr-AdamW/pg2` ... with every log line ("step") or once per "epoch";
    `lr` itself is on every log line anyway."""

    def __init__(self, options: keys.LearningRateMonitor) -> None:
        self._per_step = options.logging_interval == "step"

    def on_step_end(self, trainer: Run) -> None:
        if self._per_step and trainer.is_log_step:
            trainer.log(self._rates(trainer))

    def on_epoch_end(self, trainer: Run) -> None:
        if not self._per_step:
            trainer.log_now(self._rates(trainer), split="lr")

    def _rates(self, trainer: Run) -> dict[str, float]:
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

    def __init__(self, options: keys.SpeedMonitor) -> None:
        self._options = options
        self._epoch_began = self._step_began = 0.0
        self._step_ended: float | None = None
        self._waited: float | None = None

    def on_epoch_start(self, trainer: Run) -> None:
        self._epoch_began = time.perf_counter()
        self._step_ended = None

    def on_evaluation_start(self, trainer: Run) -> None:
        # The next step waits for the evaluation, not for its data.
        self._step_ended = None

    def on_step_start(self, trainer: Run) -> None:
        self._step_began = time.perf_counter()
        ended = self._step_ended
        self._waited = None if ended is None else self._step_began - ended

    def on_step_end(self, trainer: Run) -> None:
        self._step_ended = time.perf_counter()
        if not trainer.is_log_step or not distributed.is_main():
            return
        seconds = self._step_ended - self._step_began
        if self._options.intra_step_time:
            trainer.log({"time/intra_step (ms)": 1e3 * seconds})
        if self._options.inter_step_time and self._waited is not None:
            trainer.log({"time/inter_step (ms)": 1e3 * self._waited})
        if self._options.verbose:
            logger.info("step %d took %.1f ms", trainer.position.step, 1e3 * seconds)

    def on_epoch_end(self, trainer: Run) -> None:
        if self._options.epoch_time:
            seconds = time.perf_counter() - self._epoch_began
            trainer.log_now({"time/epoch (s)": seconds}, split="time")


class NormMonitor(Hook):
    """On log steps, before gradients are clipped: for each trainable parameter
    `stats/NAME_max` and `_mean` of |weight|, `stats/NAME_grad_max` and `_grad_mean` of |gradient|;
    and over all of them the sums `total_param_l1_norm` and `total_grad_l1_norm`.

    Gradients are those of the whole batch, on all processes together. Under nn.Graph they take an
    eager pass of their own, on log steps, with memory for its activations. With `layer_norm_only`
    single parameters are those of LayerNorm and Embedding; the sums are over all.
    """

    def __init__(self, options: keys.NormMonitor) -> None:
        self._layer_norm_only = options.layer_norm_only

    def before_update(self, trainer: Run) -> None:
        if not trainer.is_log_step:
            return
        kinds = (nn.LayerNorm, nn.Embedding) if self._layer_norm_only else nn.Module
        modules = dict(trainer.model.named_modules())
        names, figures = [], []
        totals = [flow.zeros(()), flow.zeros(())]
        weights = trainer.train_step.named_weights()
        for name, gradient in trainer.train_step.named_gradients():
            weight = next(value for other, value in weights if other == name)
            for kind, (suffix, value) in enumerate((("", weight), ("_grad", gradient))):
                with flow.no_grad():
                    size = value.abs()
                    totals[kind] = totals[kind].to(size.device) + size.sum()
                    if isinstance(modules[name.rpartition(".")[0]], kinds):
                        names += [f"stats/{name}{suffix}_max", f"stats/{name}{suffix}_mean"]
                        figures += [size.max(), size.mean()]
        names += ["total_param_l1_norm", "total_grad_l1_norm"]
        stacked = flow.stack([figure.reshape(()) for figure in [*figures, *totals]])
        if distributed.is_main():
            trainer.log(dict(zip(names, stacked.numpy().tolist(), strict=True)))


class InitialValidation(Hook):
    """Validates before the first step, for runs that start with another one's weights, such as
    projected ones. The metric log has it as the validation of step 0; early stopping and the choice
    of the best checkpoint do not count it."""

    def on_fit_start(self, trainer: Run) -> None:
        options = trainer.options
        if trainer.position.step > 0 or (options.limit_val == 0 and not options.fast_dev_run):
            return
        accuracy = trainer.evaluate(trainer.data.val)
        trainer.log_now(accuracy.as_logged(), split="val")
        logger.info("before the first step: %s", accuracy)


class MovingAverage(Hook):
    """Averages the weights after every optimizer step, the one of an epoch's last batches included;
    options are those of `ExponentialMovingAverage`."""

    def __init__(self, decay: float, use_num_updates: bool = False) -> None:
        self._decay = decay
        self._use_num_updates = use_num_updates
        self.average: ExponentialMovingAverage | None = None

    def on_fit_start(self, trainer: Run) -> None:
        self.average = ExponentialMovingAverage(trainer.model, self._decay, self._use_num_updates)

    def on_step_end(self, trainer: Run) -> None:
        assert self.average is not None
        self.average.update(trainer.model)

    def evaluation_weights(self, trainer: Run, model: nn.Module) -> AbstractContextManager[None]:
        if self.average is None:
            return nullcontext()
        if model is trainer.model:
            self.average.agree()
            return self.average.swapped_in(model)
        # A copy that is made for each evaluation, of a model of global tensors.
        averages = self.average.state_arrays()
        with flow.no_grad():
            for name, value in model.state_dict().items():
                if EMA_PREFIX + name in averages:
                    value.copy_(flow.tensor(averages[EMA_PREFIX + name]).to(value.device))
        broadcast_buffers(model)
        return nullcontext()

    def on_model_replaced(self, trainer: Run, arrays: Mapping[str, np.ndarray]) -> None:
        if self.average is not None:
            self.average.replace(trainer.model, averages_in(arrays))

    def state(self) -> dict[str, Any]:
        return {} if self.average is None else self.average.state()

    def arrays(self) -> dict[str, np.ndarray]:
        if self.average is None:
            return {}
        self.average.agree()
        return self.average.state_arrays()

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        if self.average is not None:
            self.average.load(arrays, state)


# Other names of the metrics.
_ALIASES = {"val/acc1": "val/acc", "val/acc5": "val/acctop5", "val/acc_top5": "val/acctop5"}


class Monitored:
    """The metric `monitor`, better where it is higher ("max") or lower ("min")."""

    def __init__(self, monitor: str, mode: str, key: str) -> None:
        self.monitor = _ALIASES.get(monitor, monitor)
        self.mode = mode
        self._key = key

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric's value, +-infinity for the worst where it is not a number. UserError, which
        lists the metrics, if there is no such one."""
        if self.monitor not in metrics:
            raise UserError(
                f"{self._key}.monitor is {self.monitor!r}; there are {', '.join(sorted(metrics))}"
            )
        value = metrics[self.monitor]
        return self.worst if math.isnan(value) else value

    @property
    def worst(self) -> float:
        return -math.inf if self.mode == "max" else math.inf

    def better(self, value: float, than: float, by: float = 0.0) -> bool:
        return value - than > by if self.mode == "max" else than - value > by


class EarlyStopping(Hook):
    """Stops after `patience` validations in a row without a value of `monitor` that is better by
    more than `min_delta`; `mode` is "max" where higher is better, or "min". `max_minutes`: or at
    the first validation after so many minutes."""

    def __init__(self, options: keys.EarlyStopping) -> None:
        self._options = options
        self._monitored = Monitored(options.monitor, options.mode, "callbacks.early_stopping")
        self._best: float | None = None
        self._waited = 0
        self._trainer: Run | None = None
        self._began = time.monotonic()

    def on_fit_start(self, trainer: Run) -> None:
        self._trainer = trainer

    def on_validation_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        value = self._monitored.value(metrics)
        self._waited += 1
        if self._best is None or self._monitored.better(value, self._best, self._options.min_delta):
            self._best, self._waited = value, 0
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Run) -> None:
        minutes = self._options.max_minutes
        if minutes is not None and agree.on_rank_0(self._minutes) >= minutes:
            trainer.should_stop = True
            logger.info("stopping: %g minutes are over", minutes)
        elif self._waited >= self._options.patience and trainer.may_stop:
            trainer.should_stop = True
            logger.info(
                "stopping early: %s has not been better than %.4f for %d validations",
                self._monitored.monitor,
                self._best,
                self._waited,
            )

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load(self, state: Mapping[str, Any], arrays: object) -> None:
        self._best, self._waited = state["best"], int(state["waited"])
        if self._trainer is not None:
            # A run that had stopped stays stopped, unless it is given more patience.
            self._stop_if_due(self._trainer)


class ModelCheckpoint(Hook):
    """Keeps the newest checkpoint, to resume from, and the `save_top_k` best ones by `monitor`, to
    use. `save_last` writes one at the end of every epoch, or `every_n_epochs`, and of the last, and
    when the run is told to stop, so that it can be resumed; `every_n_train_steps` (0: off) one
    every so many steps. Without both only the best are written."""

    def __init__(self, options: keys.ModelCheckpoint) -> None:
        self._options = options
        self._monitored = Monitored(options.monitor, options.mode, "callbacks.model_checkpoint")
        self.monitor = self._monitored.monitor
        # [value, step] of those kept, best first.
        self._kept: list[list[float]] = []
        self._value: float | None = None
        # A checkpoint of the step is still to be written, after its validation.
        self._is_due = False
        self._on_disk: set[int] = set()

    @property
    def best_value(self) -> float | None:
        return self._kept[0][0] if self._kept else None

    def on_fit_start(self, trainer: Run) -> None:
        self._on_disk = trainer.steps_on_disk()

    def on_step_end(self, trainer: Run) -> None:
        every = self._options.every_n_train_steps
        step = trainer.position.step
        if not every or step % every:
            return
        if trainer.pause_follows:
            # What is lost by a kill is done again: the validation must come before.
            self._is_due = True
        else:
            trainer.save_checkpoint(keep=self._steps())

    def on_validation_end(self, trainer: Run, metrics: Mapping[str, float]) -> None:
        self._value = self._monitored.value(metrics)

    def on_epoch_end(self, trainer: Run) -> None:
        position = trainer.position
        is_due = (
            position.epoch % self._options.every_n_epochs == 0 or position.step >= trainer.last_step
        )
        self._save(trainer, self._is_due or (self._options.save_last and is_due))

    def on_pause(self, trainer: Run) -> None:
        self._save(trainer, self._is_due)

    def _save(self, trainer: Run, is_due: bool) -> None:
        """Where that is due, or the last validation is among the best."""
        best = among = False
        if self._value is not None and self._options.save_top_k:
            best, among = self._rank(self._value, trainer.position.step)
        self._value, self._is_due = None, False
        if among or is_due:
            trainer.save_checkpoint(best=best, keep=self._steps())

    def on_interrupt(self, trainer: Run) -> None:
        if self._options.save_last or self._is_due:
            trainer.save_checkpoint(keep=self._steps())

    def state(self) -> dict[str, Any]:
        return {"kept": [list(entry) for entry in self._kept]}

    def load(self, state: Mapping[str, Any], arrays: object) -> None:
        # A run that goes on in another folder does not have the old one's best there.
        self._kept = [
            [float(value), int(step)] for value, step in state["kept"] if step in self._on_disk
        ]

    def _rank(self, value: float, step: int) -> tuple[bool, bool]:
        """Take a value into the list; whether it is the best, and whether it is on it at all."""
        best = not self._kept or self._monitored.better(value, self._kept[0][0])
        entry = [value, step]
        # Of equal values the older stays first.
        self._kept.append(entry)
        self._kept.sort(key=lambda kept: -kept[0] if self._monitored.mode == "max" else kept[0])
        del self._kept[self._options.save_top_k :]
        return best, any(kept is entry for kept in self._kept)

    def _steps(self) -> list[int]:
        return [int(step) for _, step in self._kept]


# The order of the hooks matters: an average follows each update, what others know by the end of an
# epoch is in its checkpoint.
_CALLBACKS: dict[str, Callable[[Any], Hook]] = {
    "ema": lambda options: MovingAverage(options.decay, options.use_num_updates),
    "params_log": ParamsLog,
    "macs": lambda _: MacsLog(),
    "initial_validation": lambda _: InitialValidation(),
    "learning_rate_monitor": LearningRateMonitor,
    "norm_monitor": NormMonitor,
    "speed_monitor": SpeedMonitor,
    "early_stopping": EarlyStopping,
    "model_checkpoint": ModelCheckpoint,
}


def build_hooks(config: Mapping[str, Any]) -> dict[str, Hook]:
    """The hooks that a configuration switches on, by the keys of `keys.Callbacks`; null is off.
    UserError for an unknown key or option, or a wrong value."""
    from flow_train.config import keys, schema  # late: see keys.py

    options = dict(schema.read(keys.Callbacks, config, "callbacks"))
    return {key: make(options[key]) for key, make in _CALLBACKS.items() if options[key] is not None}
