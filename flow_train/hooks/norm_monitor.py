"""How large weights and gradients are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneflow_accel import distributed

import oneflow as flow
from oneflow import nn

from flow_train.hooks.base import Hook

if TYPE_CHECKING:
    from flow_train.loop import Trainer


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
