"""What training minimizes and how: losses, parameter groups, optimizers, schedules, averages.

Weight decay applies to matrices: weights of dense and structured linears, of convolutions, of the
head. Not decayed are what it would only pull from its purpose: biases, scale and shift of
normalization layers, embeddings, the class and position tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneflow_accel import agree, distributed
from oneflow_accel.errors import CheckpointError
from oneflow_accel.patching.runtime import device_supports

import numpy as np
import oneflow as flow
from oneflow import nn

if TYPE_CHECKING:
    from flow_train.config import keys


class CrossEntropy:
    """Cross-entropy of scores against class indices or class probabilities.

    With smoothing s over C classes the target t becomes (1 - s) t + s / C (Szegedy et al. 2016,
    "Rethinking the Inception architecture", section 7), for soft targets, such as those of mixup,
    too. It is computed from the logarithm of the softmax, which does not overflow. `reduction` is
    "mean" over the samples, "sum", or "none".
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "mean") -> None:
        self.label_smoothing = label_smoothing
        self._reduction = reduction

    def __call__(self, scores: flow.Tensor, targets: flow.Tensor) -> flow.Tensor:
        """The loss of float scores (N, C), half precision computed in float32, against targets (N,)
        int64, or (N, C) float that sum to 1: float32 (float64 for such scores), a scalar, or (N,)
        where nothing is reduced. ValueError if the shapes do not go together."""
        if targets.shape not in (scores.shape, scores.shape[:1]):
            raise ValueError(
                f"scores of shape {tuple(scores.shape)} and targets of {tuple(targets.shape)}"
            )
        if scores.dtype in (flow.float16, flow.bfloat16):
            scores = scores.to(flow.float32)
        if targets.ndim == 2 and targets.dtype != scores.dtype:
            targets = targets.to(scores.dtype)
        if self.label_smoothing and not device_supports(scores, "causal_mask"):
            return self._smoothed(scores, targets)
        return nn.functional.cross_entropy(
            scores, targets, reduction=self._reduction, label_smoothing=self.label_smoothing
        )

    def _smoothed(self, scores: flow.Tensor, targets: flow.Tensor) -> flow.Tensor:
        """The same by operators that every device has: OneFlow's masks ignored labels."""
        uniform = -nn.functional.log_softmax(scores, dim=1).mean(dim=1)
        losses = nn.functional.cross_entropy(scores, targets, reduction="none")
        losses = losses * (1 - self.label_smoothing) + uniform * self.label_smoothing
        if self._reduction == "none":
            return losses
        return losses.sum() if self._reduction == "sum" else losses.mean()


def build_loss(config: Mapping[str, Any] | None, reduction: str = "mean") -> CrossEntropy:
    """The loss that `keys.LossFunction` describes; None is plain cross-entropy. UserError for an
    unknown name or key, or a value of the wrong type or range."""
    from flow_train.config import keys, schema  # late: see keys.py

    options = schema.read(keys.LossFunction, config, "loss_fn")
    return CrossEntropy(options.label_smoothing, reduction)


def hard_labels(targets: flow.Tensor) -> flow.Tensor:
    """Class indices, int64 (N,): of soft targets (N, C) the classes of highest probability."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets


# Tokens and position embeddings of vision transformers, by the last part of their name.
TOKEN_NAMES = frozenset({"pos_embed", "cls_token", "dist_token"})
# A module may name parameters of its own that must not be decayed in an attribute of this name.
NO_DECAY_ATTRIBUTE = "no_weight_decay"

_NORMALIZATION = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay; `names` are sorted, so that a resumed run has them in
    the same order, and `parameters` go with them."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    decayed: bool

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def group_parameters(
    model: nn.Module, *, bias_weight_decay: bool = False, normalization_weight_decay: bool = False
) -> list[ParameterGroup]:
    """Divide the trainable parameters into those with and those without weight decay; the decayed
    group is first, and an empty one is left out.

    A submodule's `no_weight_decay` (names of its own parameters, or a function that returns such
    names, which may be dotted) adds to the second group. With `normalization_weight_decay` the
    biases of normalization layers are decayed only if `bias_weight_decay` is set as well. A
    parameter that several modules share is in the group where its first name belongs. ValueError if
    no parameter requires a gradient.
    """
    without = _not_decayed(model, bias_weight_decay, normalization_weight_decay)
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not named:
        raise ValueError("the model has no parameter to train: none requires a gradient")
    groups = []
    for decayed in (True, False):
        names = tuple(sorted(name for name in named if (name not in without) == decayed))
        if names:
            groups.append(ParameterGroup(names, tuple(named[name] for name in names), decayed))
    return groups


def _not_decayed(
    model: nn.Module, bias_weight_decay: bool, normalization_weight_decay: bool
) -> set[str]:
    without = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        without |= {prefix + name for name in _flagged(module)}
        for name, _ in module.named_parameters(recurse=False):
            if (
                name in TOKEN_NAMES
                or isinstance(module, nn.Embedding)
                or (name.endswith("bias") and not bias_weight_decay)
                or (isinstance(module, _NORMALIZATION) and not normalization_weight_decay)
            ):
                without.add(prefix + name)
    return without


def _flagged(module: nn.Module) -> Iterable[str]:
    flagged = getattr(module, NO_DECAY_ATTRIBUTE, ())
    return flagged() if callable(flagged) else flagged


_OPTIMIZERS = {"adamw": flow.optim.AdamW, "sgd": flow.optim.SGD}


def build_optimizer(
    model: nn.Module, config: Mapping[str, Any], grouping: Mapping[str, Any] | None = None
) -> flow.optim.Optimizer:
    """The optimizer that `keys.Optimizer` describes, over the trainable parameters of a model on
    the device and in the layout to train in. AdamW is decoupled (Loshchilov and Hutter 2019).

    It has a group for the parameters with weight decay and one for those without (see
    `group_parameters`), the parameters of each sorted by name. UserError for an unknown name or
    key, a value of the wrong type or range, or no `lr`.
    """
    from flow_train.config import keys, schema  # late: see keys.py

    options = schema.read(keys.Optimizer, config, "optimizer").model_dump(exclude_none=True)
    flags = schema.read(keys.ParameterGrouping, grouping, "optimizer_param_grouping").model_dump()
    name, weight_decay = options.pop("name"), options.pop("weight_decay")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    groups = [
        {"params": list(group.parameters), "weight_decay": weight_decay if group.decayed else 0.0}
        for group in group_parameters(model, **flags)
    ]
    return _OPTIMIZERS[name](groups, **options)


@dataclass(frozen=True)
class Schedule:
    """The learning rate by time, as `keys.Scheduler` describes it: a linear warm-up, then one rate,
    a straight line down, or cosine annealing (Loshchilov and Hutter 2017, "SGDR", equation 5).

    The meaning of every key is that of timm's CosineLRScheduler. Two things are easily taken for
    errors: without `warmup_prefix` the cosine's phase counts from t = 0 and not from the end of the
    warm-up, so that the learning rate jumps there; and after the last cycle it stays at `lr_min`.
    """

    base_lr: float
    options: keys.Scheduler

    def __call__(self, t: float) -> float:
        options, top = self.options, self.base_lr
        if t < options.warmup_t:
            low = options.warmup_lr_init
            return low + t * (top - low) / options.warmup_t
        if options.name == "constant":
            return top
        if options.name == "linear":
            assert options.t_total is not None
            left = max(0.0, (options.t_total - t) / (options.t_total - options.warmup_t))
            return options.lr_min + (top - options.lr_min) * left
        cycle, position, length = self._cycle(t - options.warmup_t * options.warmup_prefix)
        if cycle >= options.cycle_limit:
            return options.lr_min
        phase = (position / length) ** options.k_decay
        top *= options.cycle_decay**cycle
        return options.lr_min + 0.5 * (top - options.lr_min) * (1 + math.cos(math.pi * phase))

    def _cycle(self, t: float) -> tuple[int, float, float]:
        """Number of the cycle that t is in, time since its beginning, its length."""
        assert self.options.t_initial is not None
        cycle, begin, length = 0, 0.0, float(self.options.t_initial)
        if self.options.cycle_mul == 1:
            cycle = int(t // length)
            return cycle, t - cycle * length, length
        # Beyond the last cycle nothing depends on which cycle it would be.
        while t >= begin + length and cycle < self.options.cycle_limit:
            begin += length
            length *= self.options.cycle_mul
            cycle += 1
        return cycle, t - begin, length


def build_schedule(config: Mapping[str, Any] | None, base_lr: float) -> Schedule:
    """The schedule that `keys.Scheduler` describes; None is a constant learning rate. `base_lr` is
    the optimizer's. UserError for an unknown name or key, a missing one, or a value of the wrong
    type or range."""
    from flow_train.config import keys, schema  # late: see keys.py

    given = {"name": "constant"} if config is None else config
    return Schedule(base_lr, schema.read(keys.Scheduler, given, "scheduler"))


# The schedule ResNets are trained with on ImageNet: epochs between steps, and what a step does.
DECAY_EVERY = 30
DECAY_FACTOR = 0.1


def step_decay(
    base_lr: float, epoch: int, every: int = DECAY_EVERY, factor: float = DECAY_FACTOR
) -> float:
    """Learning rate of an epoch, counted from 0: `base_lr * factor ** (epoch // every)`. ValueError
    if `epoch` is negative or `every` is not positive."""
    if epoch < 0 or every < 1:
        raise ValueError(f"epoch must be >= 0 and every >= 1, got {epoch} and {every}")
    return base_lr * factor ** (epoch // every)


# The prefix of the arrays' names in a checkpoint.
EMA = "ema"
EMA_PREFIX = f"{EMA}/"
# The buffers of BatchNorm that are averaged; its count of batches has no part in what it computes.
_STATISTICS = ("running_mean", "running_var")


def averages_in(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The moving averages among the arrays of a checkpoint, by the names of the weights."""
    return {
        name.removeprefix(EMA_PREFIX): array
        for name, array in arrays.items()
        if name.startswith(EMA_PREFIX)
    }


class ExponentialMovingAverage:
    """Keeps `shadow += (1 - d) (parameter - shadow)` for each trainable parameter, in float32.

    d is `decay`, or min(decay, (1 + n) / (10 + n)) at the n-th update with `use_num_updates`, which
    forgets the start of training sooner. Call `update` after every update of the parameters, also
    after one for the few batches left over at an epoch's end.

    The running statistics of BatchNorm are averaged in the same way: the model's own belong to its
    last weights, and averaged weights can be far from those. Other buffers, and parameters that are
    not trained, are not averaged. `shadow` has tensors by name, global where the model's are;
    `num_updates` counts over all runs of a training. ValueError if `decay` is out of range.
    """

    def __init__(self, model: nn.Module, decay: float, use_num_updates: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"the decay of the moving average is {decay}, not from 0 to 1")
        self.decay = decay
        self.use_num_updates = use_num_updates
        self.num_updates = 0
        self.shadow: dict[str, flow.Tensor] = {}
        self.reset(model)

    def reset(self, model: nn.Module) -> None:
        self.shadow = {
            name: _copy(value.detach().to(flow.float32)) for name, value in _averaged(model).items()
        }

    def current_decay(self) -> float:
        if not self.use_num_updates:
            return self.decay
        n = self.num_updates + 1
        return min(self.decay, (1 + n) / (10 + n))

    def update(self, model: nn.Module) -> None:
        """Take in the parameters after an update; KeyError if the model has others than at the
        start."""
        rate = 1 - self.current_decay()
        self.num_updates += 1
        with flow.no_grad():
            for name, value in self._matching(model).items():
                shadow = self.shadow[name]
                shadow.add_(value.detach().to(flow.float32) - shadow, alpha=rate)

    def agree(self) -> None:
        """Give all processes process 0's averages of running statistics, which each has of its own
        batches. A collective call; tensors of global models stay as they are."""
        statistics = [self.shadow[name] for name in self.shadow if name.endswith(_STATISTICS)]
        distributed.broadcast([value for value in statistics if not value.is_global])

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` has the averages as its parameters; afterwards its own again."""
        own = {name: _copy(value.detach()) for name, value in self._matching(model).items()}
        try:
            self.copy_to(model)
            yield
        finally:
            _assign(model, own)

    def copy_to(self, model: nn.Module) -> None:
        """Give `model` the averages as its parameters for good, such as to save or convert it."""
        self._matching(model)
        _assign(model, self.shadow)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Averages by "ema/" and the parameter's name, float32. A collective call for global
        tensors."""
        return {
            EMA_PREFIX + name: agree.whole(value, to=None).numpy()
            for name, value in self.shadow.items()
        }

    def state(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "use_num_updates": self.use_num_updates,
            "num_updates": self.num_updates,
        }

    def load(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
        """Go on from what `state_arrays` and `state` gave; `arrays` may hold more. The decay stays
        this object's own: it may be changed for the rest of a run. CheckpointError if an average is
        missing, or has another shape than its parameter."""
        loaded = {}
        for name, shadow in self.shadow.items():
            array = arrays.get(EMA_PREFIX + name)
            if array is None:
                raise CheckpointError(
                    f"the checkpoint has no moving average of {name}; switch callbacks.ema off, or "
                    "resume from a checkpoint of a run that had it on"
                )
            if array.shape != tuple(shadow.shape):
                raise CheckpointError(
                    f"the moving average of {name} has shape {array.shape} in the checkpoint, the "
                    f"parameter {tuple(shadow.shape)}"
                )
            loaded[name] = array
        for name, array in loaded.items():
            self.shadow[name] = _like(array, self.shadow[name])
        self.num_updates = int(state.get("num_updates", 0))

    def replace(self, model: nn.Module, averages: Mapping[str, np.ndarray]) -> None:
        """Average another model from now on, as after its structured layers became dense ones.
        `averages` has by name what the average goes on from, such as the dense form of the old
        averages; a parameter that is not there goes on with its old average if it has one of its
        shape, else starts from its own value."""
        old = self.shadow
        self.reset(model)
        for name, shadow in self.shadow.items():
            if name in averages:
                self.shadow[name] = _like(averages[name], shadow)
            elif name in old and old[name].shape == shadow.shape:
                self.shadow[name] = old[name]

    def _matching(self, model: nn.Module) -> dict[str, flow.Tensor]:
        values = _averaged(model)
        if values.keys() != self.shadow.keys():
            other = sorted(values.keys() ^ self.shadow.keys())
            raise KeyError(f"the model's parameters are not those averaged: {', '.join(other[:5])}")
        return values


def _averaged(model: nn.Module) -> dict[str, flow.Tensor]:
    """Trainable parameters and running statistics, by name; the model's own tensors."""
    values: dict[str, flow.Tensor] = {
        name: value for name, value in model.named_parameters() if value.requires_grad
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name in _STATISTICS:
                value = getattr(module, name)
                if value is not None:
                    values[f"{path}.{name}" if path else name] = value
    return values


def _copy(tensor: flow.Tensor) -> flow.Tensor:
    with flow.no_grad():
        return tensor.clone().detach()


def _assign(model: nn.Module, values: Mapping[str, flow.Tensor]) -> None:
    with flow.no_grad():
        for name, value in _averaged(model).items():
            value.copy_(values[name].to(value.dtype))


def _like(array: np.ndarray, tensor: flow.Tensor) -> flow.Tensor:
    """A float32 tensor of the array's values where `tensor` is, global if that is."""
    values = flow.zeros_like(tensor, dtype=flow.float32)
    distributed.set_value(values, array)
    return values
