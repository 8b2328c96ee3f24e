"""Makes structured layers dense after a share of the epochs; training goes on.

The dense model computes what the structured one did (Dao et al. 2022, "Monarch", section 3.3,
reverse sparsification). Step count and schedule go on, and `monarch_flow.projection` converts the
moments and the moving average. All else stays the same to the last bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from oneflow_accel import layouts
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.shards import OwnPieces
from flow_train.hooks import Hook, Run
from flow_train.options import Calendar
from flow_train.sharding import Sharding, fully_shard, shard_unit
from flow_train.sharding.units import unit_of
from flow_train.steps.graph import copy_model
from flow_train.steps.sharding import ShardedStep
from monarch_flow.projection import (
    LayerSpec,
    densify_model,
    densify_training_state,
    structured_layers,
)

# Two orders of summation in float32 differ by less.
TOLERANCE = 1e-5

logger = logging.getLogger("oneflow_accel")


class SparseToDense(Hook):
    """Makes the model's structured layers dense after `fraction` (0 to 1) of the epochs.

    The log gets the mean loss of one validation batch as "loss_before" and "loss_after", and that
    of the moving average as "average_loss_before" and "average_loss_after".
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def epoch(self, calendar: Calendar) -> int:
        """The epoch that begins with dense layers."""
        return share_of(self.fraction, calendar.total_epochs())

    def outlook(self, trainer: Run) -> str:
        layers = structured_layers(trainer.model)
        if not layers:
            return ""
        if any(spec.kind == "factors" for spec in layers.values()):
            raise UserError(
                "train.sparse_to_dense: butterfly and kaleidoscope layers cannot take the "
                "optimizer's state along; train without it, and densify_model afterwards"
            )
        epoch, epochs = self.epoch(trainer.calendar), trainer.calendar.epochs
        if epochs is not None and epoch >= epochs:
            return (
                f"in {epochs} epochs they never become dense: give more epochs, or a smaller "
                "fraction of sparse to dense"
            )
        return f"dense from epoch {epoch} on"

    def on_epoch_start(self, trainer: Run) -> None:
        # Switch as that epoch begins, or a later one where a resumed run starts there.
        layers = structured_layers(trainer.model)
        if layers and trainer.position.epoch >= self.epoch(trainer.calendar):
            switch(trainer, layers)


def share_of(fraction: float, count: int) -> int:
    """A share of so many epochs or steps, rounded up."""
    # 0.7 * 30 is a little more than 21 in binary.
    return math.ceil(round(fraction * count, 6))


def switch(trainer: Run, layers: Mapping[str, LayerSpec]) -> None:
    """Make these layers of the model dense; a collective call."""
    batch, old = next(iter(trainer.data.val)), trainer.train_step
    before, state = _losses(trainer, batch), old.state()
    arrays = old.optimizer_arrays()
    for hook in trainer.hooks.values():
        arrays |= hook.arrays()
    if isinstance(old, ShardedStep):
        arrays = _densify_units(old.sharding, arrays)
        trainer.use_model(trainer.model)
    else:
        tensors = layouts.standard_state_dict(trainer.model)
        weights = {name: value.numpy() for name, value in tensors.items()}
        arrays = densify_training_state(weights, arrays, layers).optimizer
        # A local copy, as the hooks of DistributedDataParallel stay with the old parameters.
        model = copy_model(old.evaluated_model())
        densify_model(model)
        trainer.use_model(model)
    trainer.train_step.load_optimizer(arrays, trainer.position.step)
    trainer.train_step.load_state(state)
    for hook in trainer.hooks.values():
        hook.on_model_replaced(trainer, arrays)
    after = _losses(trainer, batch)
    tell(trainer, f"epoch {trainer.position.epoch}", len(layers), before, after)


def _densify_units(sharding: Sharding, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the structured layers of a cut model dense, one unit after the other, so that no process
    holds more than one of them whole. Takes and returns what this process keeps of the optimizer's
    arrays, by KEY/SHARD; a collective call."""
    *units, root = sharding.units
    known, named = sharding.layout.groups, {unit.name for unit in units}
    pieces = {name: arrays[name] for name in arrays if name.partition("/")[2] not in known}
    for unit in [*(u for u in units if not any(u in other.inner for other in units)), root]:
        prefix = f"{unit.name}." if unit.name else ""
        parts = Sharding([unit] if unit is root else [*unit.inner, unit], unit.mesh)
        for part in parts.units:
            part.put_together()
        tensors = unit.module.state_dict()
        weights = {prefix + name: value.numpy() for name, value in tensors.items()}
        # Of the root what no unit has had.
        layers = {prefix + name: spec for name, spec in structured_layers(unit.module).items()}
        dense = densify_training_state(weights, parts.whole(arrays), layers).optimizer
        densify_model(unit.module)
        cuts = {"mesh": unit.mesh, **vars(unit.options)}
        if unit is root:
            new = fully_shard(unit.module, lambda name, _: name in named, **cuts)
        else:
            shard_unit(unit.name, unit.module, **cuts)
            again = unit_of(unit.module)
            assert again is not None
            new = Sharding([*again.inner, again], unit.mesh)
        pieces |= OwnPieces(dense, new.layout)
    return pieces


def tell(
    trainer: Run, since: str, layers: int, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    """Log the losses of a validation batch around a switch, {} for none, and warn of a change."""
    figures = {f"{name}_before": value for name, value in before.items()}
    figures |= {f"{name}_after": value for name, value in after.items()}
    losses = ""
    if figures:
        trainer.log_now(figures, split="switch")
        losses = (
            f"; loss on a validation batch {before['loss']:.7f} before, {after['loss']:.7f} after"
        )
    logger.info("%s: %d structured layers are dense from here on%s", since, layers, losses)
    for name, value in before.items():
        if not math.isclose(value, after[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            change = after[name] - value
            logger.warning("the %s has changed by %.1e at the switch", name, change)


def _losses(trainer: Run, batch: Any) -> dict[str, float]:
    """Mean losses of a batch, without dropout, of the weights and of their moving average; a
    collective call."""
    model = trainer.train_step.evaluated_model()
    losses = {"loss": _loss(trainer, model, batch)}
    if "ema" in trainer.hooks:
        with ExitStack() as stack:
            for hook in trainer.hooks.values():
                stack.enter_context(hook.evaluation_weights(trainer, model))
            losses["average_loss"] = _loss(trainer, model, batch)
    return losses


def _loss(trainer: Run, model: nn.Module, batch: Any) -> float:
    device = trainer.backend.device()
    with flow.no_grad():
        scores = model(flow.tensor(batch.images, device=device))
        labels = flow.tensor(batch.labels, device=device)
        return float(nn.functional.cross_entropy(scores, labels).numpy())
