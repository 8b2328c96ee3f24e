"""Makes the structured layers of GPT-2 dense after a share of a run's iterations; training goes on.

The dense model computes what the structured one did (Dao et al. 2022, "Monarch", section 3.3,
reverse sparsification). Step count and schedule go on, and `monarch_flow.projection` converts the
optimizer's moments.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0, whole

import numpy as np
import oneflow as flow
from libai.engine import hooks
from omegaconf import DictConfig

from libai_projects import weights
from libai_projects.weights.monarch import KEYS, in_libai_layout
from monarch_flow.projection import densify_training_state, structured_layers

if TYPE_CHECKING:
    from libai_projects.engine.trainer import Trainer

# Two orders of summation in float32 differ by less.
TOLERANCE = 1e-5

logger = logging.getLogger("libai_projects")


class SparseToDense(hooks.HookBase):
    """Makes the layers dense before the iteration that follows `fraction` (0 to 1) of the run.

    metrics.jsonl gets the loss of one validation batch as "loss_before" and "loss_after", under
    the split "switch".
    """

    trainer: Trainer

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def before_train(self) -> None:
        first = self._first()
        if not self.trainer.is_dense:
            last = self.trainer.max_iter
            text = (
                f"from iteration {first + 1} on" if first < last else "never: the run ends before"
            )
            logger.info("the structured layers become dense %s", text)

    def before_step(self) -> None:
        if not self.trainer.is_dense and self.trainer.iter >= self._first():
            switch(self.trainer)

    def _first(self) -> int:
        # 0.7 * 30 is a little more than 21 in binary.
        return math.ceil(round(self._fraction * self.trainer.max_iter, 6))


def make_dense(cfg: DictConfig) -> None:
    """Have the config's model made with dense layers only."""
    for key in KEYS:
        if cfg.model.cfg.get(key) is not None:
            cfg.model.cfg[key] = None


def switch(trainer: Trainer) -> None:
    """Go on training with the dense model that computes the same; a collective call."""
    cfg, layers = trainer.cfg, structured_layers(trainer.model)
    before = trainer.validation_loss()
    saved = trainer.checkpointer.checkpointables["optimizer"].state_dict()
    rates = trainer.lr_scheduler.state_dict()
    arrays, moments = weights.gather_state(trainer.model), _moments(saved)
    if distributed.is_main():
        state = densify_training_state(arrays, moments, layers)
        heads = cfg.model.cfg.num_attention_heads
        arrays, moments = (
            in_libai_layout(a, layers, heads) for a in (state.model, state.optimizer)
        )
    make_dense(cfg)
    trainer.use_model(trainer.build_model(cfg))
    weights.load_into(trainer.model, arrays)
    optimizer = trainer.checkpointer.checkpointables["optimizer"]
    # A graph has no state before its first step, so take the names from the model.
    names = optimizer.names
    optimizer.load_state_dict(
        {
            "param_groups": trainer.optimizer.state_dict()["param_groups"],
            "names": names,
            "state": {**_steps(saved), **_numbered(moments, names)},
            "graph": {
                name: _of_rank_0(whole(value)) for name, value in saved.get("graph", {}).items()
            },
        }
    )
    trainer.take_rates(rates)
    trainer.is_dense = True
    after = trainer.validation_loss()
    logger.info(
        "%d structured layers are dense from iteration %d on", len(layers), trainer.iter + 1
    )
    if before is None or after is None:
        return
    trainer.storage.put_scalars(
        **{"switch/loss_before": before, "switch/loss_after": after}, smoothing_hint=False
    )
    if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        logger.warning("the loss has changed by %.1e at the switch", after - before)


def _moments(saved: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the optimizer keeps, by KEY/NAME, on rank 0; empty elsewhere."""
    found = {}
    for number, name in enumerate(saved["names"]):
        for key, value in saved["state"].get(number, {}).items():
            tensor = whole(value)
            if distributed.is_main():
                found[f"{key}/{name}"] = tensor.numpy()
    return found


def _steps(saved: dict[str, Any]) -> dict[str, Any]:
    return {"step": saved["state"]["step"]} if "step" in saved["state"] else {}


def _numbered(moments: dict[str, np.ndarray], names: list[str]) -> dict[int, dict[str, Any]]:
    """Rank 0's moments as tensors there, by number of the parameter; a collective call."""
    state: dict[int, dict[str, Any]] = {}
    for name in on_rank_0(lambda: list(moments)):
        key, _, parameter = name.partition("/")
        moment = flow.tensor(moments.get(name, []))
        state.setdefault(names.index(parameter), {})[key] = _of_rank_0(moment)
    return state


def _of_rank_0(tensor: flow.Tensor) -> flow.Tensor:
    """Rank 0's local tensor as a global one there, as `oneflow_files.load` gives them."""
    return tensor.to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
