"""Accuracy of class scores, and validation: each image once, in any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import DataError
from oneflow_accel.training import distributed

import oneflow as flow
from oneflow import nn


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


def class_scores(output: flow.Tensor | tuple[flow.Tensor, ...]) -> flow.Tensor:
    """A model's scores of shape (N, classes); GoogLeNet and Inception v3 return those of their
    auxiliary heads besides."""
    return output if isinstance(output, flow.Tensor) else output[0]


def count_correct(scores: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
    """How many labels are the highest score, and how many are among the five highest.

    Args:
        scores: (N, classes), float.
        labels: (N,), int64.

    Returns:
        Two float32 scalars that stay on the device.
    """
    best = flow.topk(scores, min(5, scores.shape[1]), dim=1)[1]
    hits = (best == labels.unsqueeze(1)).to(flow.float32)
    return hits[:, :1].sum(), hits.sum()


def validate(
    model: Callable[[flow.Tensor], flow.Tensor | tuple[flow.Tensor, ...]],
    loader: Iterable[Any],
    backend: Backend,
    *,
    max_batches: int | None = None,
    criterion: Callable[[flow.Tensor, flow.Tensor], flow.Tensor] | None = None,
) -> Accuracy:
    """Evaluate `model` on the images of `loader`; the same result on every process.

    Args:
        model: local to this process, in eval mode, in the loader's layout; or its forward pass.
        loader: yields this process's share of the images as batches with `images`, float32, and
            `labels`, int64 of shape (N,); the last batch may be shorter.
        backend: the device of the model.
        max_batches: the most batches that each process takes; None takes all.
        criterion: sum of the losses of a batch; None is plain cross-entropy.

    Raises:
        DataError: no image could be read.
    """
    device = backend.device()
    criterion = criterion or nn.CrossEntropyLoss(reduction="sum")
    sums = None
    images = 0
    with flow.no_grad():
        for batch in islice(loader, max_batches):
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
