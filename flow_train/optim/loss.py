"""Cross-entropy on hard and on soft targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import oneflow as flow
from oneflow import nn

from flow_train.config import keys
from flow_train.config.schema import read


class CrossEntropy(nn.Module):
    """Cross-entropy of scores against class indices or class probabilities.

    With smoothing s over C classes the target t becomes (1 - s) t + s / C (Szegedy et al. 2016,
    "Rethinking the Inception architecture", section 7), for soft targets, such as those of mixup,
    too. It is computed from the logarithm of the softmax, which does not overflow. `reduction` is
    "mean" over the samples, "sum", or "none".
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "mean") -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self._loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing, reduction=reduction)

    def forward(self, scores: flow.Tensor, targets: flow.Tensor) -> flow.Tensor:
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
        return self._loss(scores, targets)


def build_loss(config: Mapping[str, Any] | None, reduction: str = "mean") -> CrossEntropy:
    """The loss that `keys.LossFunction` describes; None is plain cross-entropy. UserError for an
    unknown name or key, or a value of the wrong type or range."""
    options = read(keys.LossFunction, config, "loss_fn")
    return CrossEntropy(options.label_smoothing, reduction)


def hard_labels(targets: flow.Tensor) -> flow.Tensor:
    """Class indices, int64 (N,): of soft targets (N, C) the classes of highest probability."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets
