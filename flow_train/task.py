"""What a model is trained for: its loss, the figures of steps and evaluations, and their units.
Loop, steps, meter and console know no more of it.

A batch is one array per name, float32 or int64, whose first axis is the samples'. Loaders may give
objects with attributes of these names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, ClassVar

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.data.real_labels import RealLabels
from flow_train.metrics.macs import count_macs, macs_of_call
from flow_train.optim import hard_labels

Batch = Mapping[str, np.ndarray]
Tensors = Mapping[str, flow.Tensor]
Criterion = Callable[[flow.Tensor, flow.Tensor], flow.Tensor]


@dataclass(frozen=True)
class Sum:
    """A figure of a batch before it is a mean: a sum, and over how many. Each is a number, or a
    scalar tensor where only the device knows it. Under nn.Graph it is of all processes."""

    total: flow.Tensor | float
    count: flow.Tensor | float


@dataclass(frozen=True)
class Figure:
    """How a figure is shown.

    Attributes:
        name: in configurations, as in "val/NAME".
        label, form: on the console; the format of a number in a column there.
        value: from total and count.
    """

    name: str
    label: str
    form: str
    value: Callable[[float, float], float]


def _mean(total: float, count: float) -> float:
    return total / count


LOSS = Figure("loss", "Loss", ".4e", _mean)


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a data set; `sums` are total and count of the loss and of figures, by
    their names in metrics.jsonl."""

    task: Task
    sums: Mapping[str, tuple[float, float]]

    def __getitem__(self, name: str) -> float:
        return self.task.figure(name).value(*self.sums[name])

    def as_logged(self) -> dict[str, float]:
        """All values, by the names in metrics.jsonl."""
        return {name: self[name] for name in self.sums}

    @property
    def count(self) -> int:
        """Images, or what else the task counts."""
        return int(self.sums["loss"][1])

    def __str__(self) -> str:
        figures = [f"{self.task.figure(n).label} {self[n]:.3f}" for n in self.sums if n != "loss"]
        return f"* {' '.join(figures)} Loss {self['loss']:.4f} ({self.count} {self.task.unit})"

    def check(self) -> None:
        """Refuse a loss that is nan or infinite, with a UserError that says so."""
        if not math.isfinite(self["loss"]):
            what = self.task.unit
            raise UserError(
                f"the loss on the validation {what} is {self['loss']}: the model's weights, or "
                f"what it computes from these {what}, are not finite numbers; its figures say "
                "nothing"
            )


class Task(ABC):
    """A subclass gives all of this; what it logs besides the loss is in `figures`, by the names in
    metrics.jsonl.

    Attributes:
        unit: what its rate counts, as in "images_per_second".
        samples: what its batch size counts.
        inputs: the arrays of a batch that `loss` takes.
    """

    unit: ClassVar[str]
    samples: ClassVar[str]
    inputs: ClassVar[Sequence[str]]
    figures: ClassVar[Mapping[str, Figure]]

    @abstractmethod
    def loss(self, model: nn.Module, batch: Tensors) -> tuple[flow.Tensor, dict[str, Sum]]:
        """The mean loss of a batch, to be differentiated, and a Sum for each of `figures`."""

    @abstractmethod
    def sums(self, model: nn.Module, batch: Tensors, given: Any) -> dict[str, Sum]:
        """Of an evaluation's batch, `given` by its loader: "loss" and each of `evaluated`."""

    @abstractmethod
    def units(self, batch: Batch) -> int:
        """How many `unit` a batch has; the loss of a part of it weighs as much."""

    @property
    def evaluated(self) -> Mapping[str, Figure]:
        """The figures of an evaluation."""
        return self.figures

    def figure(self, name: str) -> Figure:
        return LOSS if name == "loss" else self.evaluated[name]

    def arrays(self, batch: Any) -> Batch:
        """Of what a loader gives, the arrays that `loss` takes."""
        of = batch.__getitem__ if isinstance(batch, Mapping) else batch.__getattribute__
        return {name: of(name) for name in self.inputs}

    def size(self, batch: Batch) -> int:
        """How many samples a batch has."""
        return len(batch[self.inputs[0]])

    def macs_per_unit(self, model: nn.Module, batch: Batch, backend: Backend) -> float:
        """Multiply-accumulates of the forward pass. The model is local, runs once in eval mode, on
        a sample of zeros of the batch's shape, and is left as it was."""
        array = batch[self.inputs[0]]
        sample = flow.tensor(np.zeros((1, *array.shape[1:]), array.dtype), device=backend.device())
        macs = sum(module.macs for module in macs_of_call(model, sample))
        return macs / self.units({name: array[:1] for name, array in batch.items()})

    def evaluate(
        self,
        model: Callable[..., Any],
        loader: Iterable[Any],
        backend: Backend,
        *,
        max_batches: int | None = None,
        watch: Callable[[Tally], None] | None = None,
        collective: bool = False,
    ) -> Evaluation:
        """Evaluate a model on the data of `loader`; the same result on every process.

        Args:
            model: local to this process, in eval mode, in the loader's layout; or its forward pass.
            loader: yields this process's share as batches; the last one may be shorter.
            max_batches: the most batches that each process takes; None takes all.
            watch: called after each batch with what this process has counted.
            collective: the forward pass needs all processes, so that one without a batch runs on
                zeros as long as another has one.

        Raises:
            DataError: there was nothing to evaluate.
        """
        tally, device = Tally(self), backend.device()
        batches: Iterable[Any] = islice(loader, max_batches)
        with flow.no_grad():
            for given in self._in_step(batches, model, device) if collective else batches:
                tally.add(self.sums(model, to(device, self.arrays(given)), given))
                if watch is not None:
                    watch(tally)
        return tally.total()

    def _in_step(
        self, batches: Iterable[Any], model: Callable[..., Any], device: flow.device
    ) -> Iterator[Any]:
        """The batches; where they end before another process's do, the model runs on zeros."""
        for batch in chain(batches, repeat(None)):
            mine = None
            if batch is not None:
                mine = [(n, a.shape, a.dtype.name) for n, a in self.arrays(batch).items()]
            shapes = [each for each in distributed.all_gather_json(mine) if each is not None]
            if not shapes:
                return
            if batch is not None:
                yield batch
            else:
                zeros = {name: np.zeros(shape, dtype) for name, shape, dtype in shapes[0]}
                self.loss(model, to(device, zeros))

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of the data."""
        return {}

    def named(self, values: Mapping[str, float], split: str) -> dict[str, float]:
        """Values by the names that configurations use, such as "val/loss"."""
        return {f"{split}/{self.figure(name).name}": value for name, value in values.items()}


class Tally:
    """What a process has counted so far in an evaluation."""

    def __init__(self, task: Task) -> None:
        self.batches = 0
        self._task = task
        self._names = ["loss", *task.evaluated]
        # Total and count of each name; at `_places` what is on the device is added.
        self._numbers = np.zeros(2 * len(self._names))
        self._places: list[int] = []
        self._on_device: flow.Tensor | None = None

    def add(self, sums: Mapping[str, Sum]) -> None:
        each = [value for name in self._names for value in (sums[name].total, sums[name].count)]
        tensors = {n: value for n, value in enumerate(each) if isinstance(value, flow.Tensor)}
        self._places = list(tensors)
        found = flow.stack([value.reshape(()) for value in tensors.values()])
        self._on_device = found if self._on_device is None else self._on_device + found
        self._numbers += [0.0 if n in tensors else float(value) for n, value in enumerate(each)]
        self.batches += 1

    def line(self) -> str:
        """What a console line says of this process's share; waits for the device."""
        own = self._evaluation(self._all())
        figures = [f"{figure.label} {own[n]:.3f}" for n, figure in self._task.figures.items()]
        return "\t".join([f"Loss {own['loss']:.4f}", *figures])

    def total(self) -> Evaluation:
        """Of all processes; a collective call. DataError if there was nothing."""
        return self._evaluation(distributed.all_reduce_sum(self._all()))

    def _all(self) -> list[float]:
        numbers = self._numbers.copy()
        if self._on_device is not None:
            numbers[self._places] += self._on_device.numpy()
        return [float(number) for number in numbers]

    def _evaluation(self, numbers: Sequence[float]) -> Evaluation:
        if not numbers[1]:
            raise DataError(f"there are no {self._task.unit} to evaluate, or none could be read")
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return Evaluation(self._task, dict(zip(self._names, pairs, strict=True)))


def to(device: flow.device, batch: Batch) -> dict[str, flow.Tensor]:
    return {name: flow.tensor(array, device=device) for name, array in batch.items()}


def _percent(total: float, count: float) -> float:
    # Of only a few images, none may have a real label.
    return 100 * total / max(count, 1)


class ImageTask(Task):
    """Classification of `images`, float32 (N, C, H, W), by `labels`, int64 (N,) or float32
    (N, classes); accuracy in percent, where a soft label counts as its most probable class.

    Args:
        criterion: the mean loss of a batch, of scores and labels; None is plain cross-entropy.
        shape: of an image, (channels, height, width).
        validation: the sum of the losses of an evaluation's batch, likewise.
        num_classes, classes: how many, and their names in the order of their indices, if any.
        real_labels: evaluate by these, too; batches have `indices` then, int64 (N,), positions in
            the data set.
        keep: called with the scores (N, classes) of each batch of an evaluation, and the batch.
    """

    unit = samples = "images"
    inputs = ("images", "labels")
    figures: ClassVar[Mapping[str, Figure]] = {
        "acc1": Figure("acc", "Acc@1", "6.2f", _percent),
        "acc5": Figure("acctop5", "Acc@5", "6.2f", _percent),
    }
    _of_real_labels: ClassVar[Mapping[str, Figure]] = {
        "real_acc1": Figure("real_acc", "Real@1", "6.2f", _percent),
        "real_acc5": Figure("real_acctop5", "Real@5", "6.2f", _percent),
    }

    def __init__(
        self,
        criterion: Criterion | None = None,
        shape: tuple[int, int, int] | None = None,
        *,
        validation: Criterion | None = None,
        num_classes: int = 0,
        classes: Sequence[str] = (),
        real_labels: RealLabels | None = None,
        keep: Callable[[flow.Tensor, Any], None] | None = None,
    ) -> None:
        self.criterion = _function(criterion or nn.CrossEntropyLoss())
        self.shape = shape
        self._validation = _function(validation or nn.CrossEntropyLoss(reduction="sum"))
        self._state = {"num_classes": num_classes, "classes": list(classes)}
        self._real_labels = real_labels
        self._keep = keep

    def loss(self, model: nn.Module, batch: Tensors) -> tuple[flow.Tensor, dict[str, Sum]]:
        labels = batch["labels"]
        scores = class_scores(model(batch["images"])).float()
        loss = self.criterion(scores, labels)
        with flow.no_grad():
            hits = count_hits(best_classes(scores), hard_labels(labels))
        return loss, {name: Sum(n, len(labels)) for name, n in zip(self.figures, hits, strict=True)}

    def sums(self, model: nn.Module, batch: Tensors, given: Any) -> dict[str, Sum]:
        labels = batch["labels"]
        scores = class_scores(model(batch["images"]))
        best = best_classes(scores)
        totals = (self._validation(scores, labels), *count_hits(best, labels))
        names = ("loss", *self.figures)
        found = {name: Sum(total, len(labels)) for name, total in zip(names, totals, strict=True)}
        if self._real_labels is not None:
            labeled, *hits = self._real_labels.count(given.indices, best.numpy())
            found |= {
                name: Sum(total, labeled)
                for name, total in zip(self._of_real_labels, hits, strict=True)
            }
        if self._keep is not None:
            self._keep(scores, given)
        return found

    def units(self, batch: Batch) -> int:
        return self.size(batch)

    @property
    def evaluated(self) -> Mapping[str, Figure]:
        return {**self.figures, **(self._of_real_labels if self._real_labels is not None else {})}

    def macs(self, model: nn.Module) -> int:
        """Of one image; the model is local."""
        assert self.shape is not None
        channels, *size = self.shape
        return count_macs(model, size, channels)

    def state(self) -> dict[str, Any]:
        return self._state


def _function(criterion: Criterion) -> Criterion:
    # A module that is not a part of the model warns when it is called in a graph.
    return criterion.forward if isinstance(criterion, nn.Module) else criterion


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


def best_classes(scores: flow.Tensor) -> flow.Tensor:
    """(N, 5), or fewer where there are fewer classes: the best classes, the highest score first."""
    return flow.topk(scores, min(5, scores.shape[1]), dim=1)[1]


def count_hits(best: flow.Tensor, labels: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
    """How many labels (N,), int64, are the first of their best classes, and how many are among
    them: two float32 scalars that stay on the device."""
    hits = (best == labels.unsqueeze(1)).to(flow.float32)
    return hits[:, :1].sum(), hits.sum()


# The label of a token that is not to be predicted.
IGNORED = -100


def _perplexity(total: float, count: float) -> float:
    # Of a model that has not begun to learn it may be beyond a float.
    return math.exp(min(total / count, 700.0))


class TokenTask(Task):
    """Language modelling: of `tokens`, int64 (N, T), the model gives scores (N, T, vocabulary) for
    `labels`, int64 (N, T), IGNORED where there is nothing to predict. The loss is the mean of the
    cross-entropy over the labels of a process's batch, and perplexity its exponential."""

    unit, samples = "tokens", "sequences"
    inputs = ("tokens", "labels")
    figures: ClassVar[Mapping[str, Figure]] = {
        "perplexity": Figure("perplexity", "PPL", "8.3f", _perplexity)
    }

    def loss(self, model: nn.Module, batch: Tensors) -> tuple[flow.Tensor, dict[str, Sum]]:
        scores, labels = model(batch["tokens"]).float(), batch["labels"].reshape(-1)
        scores = scores.reshape(-1, scores.shape[-1])
        total = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        count = (labels != IGNORED).to(flow.float32).sum()
        return total / count, {"perplexity": Sum(total.detach(), count)}

    def sums(self, model: nn.Module, batch: Tensors, given: Any) -> dict[str, Sum]:
        _, found = self.loss(model, batch)
        return {"loss": found["perplexity"], **found}

    def units(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())
