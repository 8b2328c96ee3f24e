"""Validation: every image exactly once, in any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import DataError
from oneflow_accel.training import distributed

import oneflow as flow
from oneflow import nn

from resnet50_imagenet.execution import class_scores, count_correct


@dataclass(frozen=True)
class Accuracy:
    """Means over all validation images: loss, and accuracy in percent."""

    loss: float
    acc1: float
    acc5: float
    images: int

    def __str__(self) -> str:
        return (
            f"* Acc@1 {self.acc1:.3f} Acc@5 {self.acc5:.3f} Loss {self.loss:.4f} "
            f"({self.images} images)"
        )


def validate(
    model: Callable[[flow.Tensor], flow.Tensor | tuple[flow.Tensor, ...]], loader, backend: Backend
) -> Accuracy:
    """Evaluate `model` on all images of `loader`; the same result on every process.

    Args:
        model: local to this process, in eval mode, in the loader's layout; or its forward pass.
        loader: yields this process's share of the images, the last batch may be shorter.

    Raises:
        DataError: no image could be read.
    """
    device = backend.device()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    sums = None
    images = 0
    with flow.no_grad():
        for batch in loader:
            scores = class_scores(model(flow.tensor(batch.images, device=device)))
            labels = flow.tensor(batch.labels, device=device)
            figures = flow.stack([criterion(scores, labels), *count_correct(scores, labels)])
            sums = figures if sums is None else sums + figures
            images += len(batch.labels)
    local = [0.0, 0.0, 0.0] if sums is None else [float(value) for value in sums.numpy()]
    loss, top1, top5, total = distributed.all_reduce_sum([*local, float(images)])
    if total == 0:
        raise DataError("no validation image could be read")
    return Accuracy(loss / total, 100 * top1 / total, 100 * top5 / total, int(total))
