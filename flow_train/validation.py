"""Accuracy of class scores, and validation: each image once, in any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.data.real_labels import RealLabels

Criterion = Callable[[flow.Tensor, flow.Tensor], flow.Tensor]


@dataclass(frozen=True)
class RealAccuracy:
    """The share of the images with real labels whose prediction is one of them, in percent; `acc5`
    where any of the five likeliest is."""

    acc1: float
    acc5: float
    images: int


@dataclass(frozen=True)
class Accuracy:
    """Means over all validation images: loss, and accuracy in percent; `real` where the images have
    real labels besides."""

    loss: float
    acc1: float
    acc5: float
    images: int
    real: RealAccuracy | None = None

    def __str__(self) -> str:
        real = self.real
        more = "" if real is None else f"Real@1 {real.acc1:.3f} Real@5 {real.acc5:.3f} "
        return (
            f"* Acc@1 {self.acc1:.3f} Acc@5 {self.acc5:.3f} {more}Loss {self.loss:.4f} "
            f"({self.images} images)"
        )

    def check(self) -> None:
        """Refuse a loss that is nan or infinite, with a UserError that says so."""
        if not math.isfinite(self.loss):
            raise UserError(
                f"the loss on the validation images is {self.loss}: the model's weights, or what "
                "it computes from these images, are not finite numbers; its accuracy says nothing"
            )

    def as_logged(self) -> dict[str, float]:
        """Loss, and accuracy in percent, by the names in metrics.jsonl."""
        return {"loss": self.loss, "acc1": self.acc1, "acc5": self.acc5}


def class_scores(output: flow.Tensor | tuple[flow.Tensor, ...]) -> flow.Tensor:
    """A model's scores of shape (N, classes); GoogLeNet and Inception v3 return those of their
    auxiliary heads besides. UserError if there is no class, as where a last pooling is larger than
    what is left of the image: OneFlow's cross entropy would end the process with SIGFPE."""
    scores = output if isinstance(output, flow.Tensor) else output[0]
    if scores.shape[-1] == 0:
        raise UserError(
            f"the model gives no class scores, but a tensor of the shape {tuple(scores.shape)}: "
            "the images are too small for it; give it larger ones (--image-size in main.py)"
        )
    return scores


def count_correct(scores: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
    """How many labels (N,), int64, are the highest score (N, classes), and how many are among the
    five highest: two float32 scalars that stay on the device."""
    return _count_hits(_best_classes(scores), labels)


def _best_classes(scores: flow.Tensor) -> flow.Tensor:
    """(N, 5), or fewer where there are fewer classes: the best classes, the highest score first."""
    return flow.topk(scores, min(5, scores.shape[1]), dim=1)[1]


def _count_hits(best: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
    hits = (best == labels.unsqueeze(1)).to(flow.float32)
    return hits[:, :1].sum(), hits.sum()


class Tally:
    """What a process has counted so far; `criterion` is the sum of the losses of a batch."""

    def __init__(self, criterion: Criterion, real_labels: RealLabels | None = None) -> None:
        self.batches = 0
        self.images = 0
        self._criterion = criterion
        self._sums: flow.Tensor | None = None
        self._real_labels = real_labels
        self._real = np.zeros(3)

    def add(self, scores: flow.Tensor, labels: flow.Tensor, indices: np.ndarray | None) -> None:
        """Count one batch: scores (N, classes), float; labels (N,), int64, where the scores are;
        `indices`, int64 (N,), positions in the data set, used with real labels only."""
        best = _best_classes(scores)
        figures = flow.stack([self._criterion(scores, labels), *_count_hits(best, labels)])
        self._sums = figures if self._sums is None else self._sums + figures
        self.batches += 1
        self.images += int(labels.shape[0])
        if self._real_labels is not None:
            assert indices is not None
            self._real += self._real_labels.count(indices, best.numpy())

    def accuracy(self) -> Accuracy:
        """Of this process's images; waits for the device. DataError if there was none."""
        return self._accuracy(self._numbers())

    def total(self) -> Accuracy:
        """Of all processes' images. A collective call. DataError if there was none."""
        return self._accuracy(distributed.all_reduce_sum(self._numbers()))

    def _numbers(self) -> list[float]:
        sums = [0.0] * 3 if self._sums is None else [float(value) for value in self._sums.numpy()]
        return [*sums, float(self.images), *map(float, self._real)]

    def _accuracy(self, numbers: list[float]) -> Accuracy:
        loss, top1, top5, images, labeled, real1, real5 = numbers
        if images == 0:
            raise DataError("no validation image could be read")
        real = None
        if self._real_labels is not None:
            # Of only a few images, none may have a label.
            most = max(labeled, 1.0)
            real = RealAccuracy(100 * real1 / most, 100 * real5 / most, int(labeled))
        return Accuracy(loss / images, 100 * top1 / images, 100 * top5 / images, int(images), real)


def validate(
    model: Callable[[flow.Tensor], flow.Tensor | tuple[flow.Tensor, ...]],
    loader: Iterable[Any],
    backend: Backend,
    *,
    max_batches: int | None = None,
    criterion: Criterion | None = None,
    real_labels: RealLabels | None = None,
    watch: Callable[[Tally], None] | None = None,
    keep: Callable[[flow.Tensor, Any], None] | None = None,
    collective: bool = False,
) -> Accuracy:
    """Evaluate `model` on the images of `loader`; the same result on every process.

    Args:
        model: local to this process, in eval mode, in the loader's layout; or its forward pass.
        loader: yields this process's share of the images as batches with `images`, float32, and
            `labels`, int64 (N,); the last batch may be shorter.
        max_batches: the most batches that each process takes; None takes all.
        criterion: sum of the losses of a batch; None is plain cross-entropy.
        real_labels: also count by these; batches have `indices` then, positions in the data set.
        watch: called after each batch with what this process has counted.
        keep: called with the scores (N, classes) of each batch, and with the batch.
        collective: the forward pass needs all processes, so that one without a batch runs on black
            images as long as another has one.

    Raises:
        DataError: no image could be read.
    """
    device = backend.device()
    tally = Tally(criterion or nn.CrossEntropyLoss(reduction="sum"), real_labels)
    batches: Iterable[Any] = islice(loader, max_batches)
    with flow.no_grad():
        for batch in _in_step(batches, model, device) if collective else batches:
            scores = class_scores(model(flow.tensor(batch.images, device=device)))
            labels = flow.tensor(batch.labels, device=device)
            tally.add(scores, labels, getattr(batch, "indices", None))
            if keep is not None:
                keep(scores, batch)
            if watch is not None:
                watch(tally)
    return tally.total()


def _in_step(
    batches: Iterable[Any], model: Callable[[flow.Tensor], Any], device: flow.device
) -> Iterator[Any]:
    """The batches; where they end before another process's do, the model runs on black images."""
    for batch in chain(batches, repeat(None)):
        mine = None if batch is None else list(batch.images.shape)
        shapes = [each for each in distributed.all_gather_json(mine) if each is not None]
        if not shapes:
            return
        if batch is not None:
            yield batch
        else:
            model(flow.zeros(*shapes[0], device=device))
