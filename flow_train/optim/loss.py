"""Cross-entropy on hard and on soft targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.config.checked import checked_options, name_of


class CrossEntropy(nn.Module):
    """Cross-entropy of scores against class indices or class probabilities.

    With smoothing s over C classes the target t becomes (1 - s) t + s / C (Szegedy et al. 2016,
    "Rethinking the Inception architecture", section 7), for soft targets, such as those of mixup,
    too. It is computed from the logarithm of the softmax, which does not overflow.

    Args:
        label_smoothing: s, from 0 to below 1.
        reduction: "mean" over the samples, "sum", or "none".

    Raises:
        ValueError: `label_smoothing` is out of range.
    """

    def __init__(self, label_smoothing: float = 0.0, reduction: str = "mean") -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} is not from 0 to below 1")
        self.label_smoothing = label_smoothing
        self._loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing, reduction=reduction)

    def forward(self, scores: flow.Tensor, targets: flow.Tensor) -> flow.Tensor:
        """
        Args:
            scores: (N, C), float; half precision is computed in float32.
            targets: (N,) int64, or (N, C) float that sum to 1.

        Returns:
            float32 (float64 for such scores): a scalar, or (N,) where nothing is reduced.

        Raises:
            ValueError: the shapes do not go together.
        """
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
    """The loss that a configuration describes.

    Args:
        config: `name` or `_target_` (CrossEntropy, CrossEntropyLoss) and `label_smoothing`; None is
            plain cross-entropy.

    Raises:
        UserError: an unknown name or key, or a value of the wrong type or range.
    """
    config = config or {}
    aliases = {"crossentropyloss": "crossentropy", "cross_entropy": "crossentropy"}
    name_of(config, ("crossentropy",), aliases, what="loss", default="crossentropy")
    options = checked_options(config, {"label_smoothing": float}, what="loss")
    try:
        return CrossEntropy(reduction=reduction, **options)
    except ValueError as error:
        raise UserError(f"the loss's {error}") from error


def hard_labels(targets: flow.Tensor) -> flow.Tensor:
    """Class indices, int64 (N,): of soft targets (N, C) the classes of highest probability."""
    return targets.argmax(dim=1) if targets.ndim == 2 else targets
