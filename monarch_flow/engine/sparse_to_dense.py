"""Sparse to dense: after a share of the epochs structured layers become dense and training goes on.

The dense model computes what the structured one did (Dao et al. 2022, "Monarch", section 3.3,
reverse sparsification), the number of steps and the schedule go on, and so do the optimizer's
moments and the moving average, see `monarch_flow.projection`.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any

from oneflow_accel import layouts

import oneflow as flow
from oneflow import nn

from monarch_flow.projection import densify_model, densify_training_state, structured_layers

if TYPE_CHECKING:
    from monarch_flow.engine.trainer import Trainer

# Two orders of summation in float32 differ by less.
TOLERANCE = 1e-5

logger = logging.getLogger("oneflow_accel")


def switch_if_due(trainer: Trainer) -> bool:
    """At the beginning of the epoch that the configuration names, or of a later one, make the
    model's structured layers dense. Every process calls it at the beginning of every epoch.

    Returns:
        Whether it did.
    """
    epoch = trainer.calendar.switch_epoch()
    if epoch is None or trainer.position.epoch < epoch:
        return False
    layers = structured_layers(trainer.model)
    if not layers:
        return False
    batch = next(iter(trainer.data.val))
    before = _loss(trainer, batch)
    arrays = trainer.train_step.optimizer_arrays()
    for callback in trainer.callbacks.values():
        arrays |= callback.arrays()
    weights = {
        name: value.numpy() for name, value in layouts.standard_state_dict(trainer.model).items()
    }
    state = densify_training_state(weights, arrays, layers)
    # A copy: the hooks of DistributedDataParallel stay with the old parameters.
    model = copy.deepcopy(trainer.train_step.evaluated_model())
    densify_model(model)
    step_state = trainer.train_step.state()
    trainer.use_model(model)
    trainer.train_step.load_optimizer(state.optimizer, trainer.position.step)
    trainer.train_step.load_state(step_state)
    for callback in trainer.callbacks.values():
        callback.on_model_replaced(trainer, state.optimizer)
    after = _loss(trainer, batch)
    trainer.log_now({"loss_before": before, "loss_after": after}, split="switch")
    logger.info(
        "epoch %d: %d structured layers are dense from here on; loss on a validation batch %.7f "
        "before, %.7f after",
        trainer.position.epoch,
        len(layers),
        before,
        after,
    )
    if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        logger.warning("the loss has changed by %.1e at the switch", after - before)
    return True


def _loss(trainer: Trainer, batch: Any) -> float:
    """Mean loss of a batch, without dropout."""
    model = trainer.train_step.evaluated_model()
    device = trainer.backend.device()
    with flow.no_grad():
        scores = model(flow.tensor(batch.images, device=device))
        labels = flow.tensor(batch.labels, device=device)
        return float(nn.functional.cross_entropy(scores, labels).numpy())
