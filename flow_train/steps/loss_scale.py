"""Dynamic loss scaling for float16 in eager mode; oneflow 0.9.0 has it under nn.Graph only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import oneflow as flow


class LossScaler:
    """Multiplies the loss so that small gradients do not become 0 in float16 (Micikevicius et al.
    2018, "Mixed precision training", section 3.2). Where a gradient is not finite the step is left
    out and the scale halved; after `growth_interval` good steps in a row it is doubled."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self._good_steps = 0

    def unscale(self, parameters: Iterable[flow.Tensor]) -> bool:
        """Divide the gradients by the scale; False where one is not finite, and the step must be
        left out. Waits for the device."""
        gradients = [value.grad for value in parameters if value.grad is not None]
        with flow.no_grad():
            for gradient in gradients:
                gradient.mul_(1.0 / self.scale)
            norms = flow.stack([gradient.norm() for gradient in gradients])
        # The gradients are the same on all processes, so all of them decide the same.
        finite = math.isfinite(float(norms.sum().numpy()))
        self._adapt(finite)
        return finite

    def _adapt(self, finite: bool) -> None:
        if not finite:
            self.scale /= 2
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale *= 2
            self._good_steps = 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
