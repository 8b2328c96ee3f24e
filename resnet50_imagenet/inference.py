"""Prepares, times and records the model for --evaluate and --benchmark."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError
from oneflow_accel.inference import prepare

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.data.images import Batch, ImageFolder, SyntheticImages
from flow_train.files import replace_file
from flow_train.metrics.macs import macs_of_call
from flow_train.metrics.peak import peak_of, seconds_of_runs
from flow_train.metrics.work import FLOPS_PER_MAC

Output = flow.Tensor | tuple[flow.Tensor, ...]


def inference_model(
    model: nn.Module, backend: Backend, precision: str = "float32", *, fold: bool
) -> nn.Module:
    """A local model in eval mode, changed in place. `fold` returns a copy with batch norm folded
    into the convolutions; "bfloat16" needs that, where the device has it."""
    model = model.eval()
    if not fold:
        return model
    return prepare(model, flow.bfloat16 if precision == "bfloat16" else None, backend)


def forward_graph(model: nn.Module) -> nn.Graph:
    class ForwardGraph(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, batch: flow.Tensor) -> flow.Tensor:
            return self.model(batch)

    return ForwardGraph()


def graph_forward(model: nn.Module) -> Callable[[flow.Tensor], Output]:
    """The forward pass of `model` under nn.Graph, which is built for one shape: batches of another,
    such as a dataset's last, run eagerly."""
    graph = forward_graph(model)
    shape: tuple[int, ...] | None = None

    def forward(batch: flow.Tensor) -> Output:
        nonlocal shape
        if shape is None:
            shape = tuple(batch.shape)
        return graph(batch) if tuple(batch.shape) == shape else model(batch)

    return forward


def measure_forward(model: nn.Module, images: np.ndarray, backend: Backend, dtype: str) -> str:
    """Time the forward pass of `model` (in eval mode) on `images`, already in its layout: images/s,
    FLOP/s of its products, and their share of the device's peak in `dtype`, such as "float32"."""
    batch = flow.tensor(images, device=backend.device())
    flops = FLOPS_PER_MAC * sum(module.macs for module in macs_of_call(model, batch))
    graph = forward_graph(model)
    with flow.no_grad():
        seconds = statistics.median(seconds_of_runs(lambda: graph(batch), backend, runs=10))
    peak = peak_of(backend, dtype)
    return (
        f"{len(images) / seconds:.2f} img/s, {flops / seconds / 1e12:.3f} TFLOP/s, "
        f"{100 * flops / seconds / peak.flops:.1f} % of {peak}"
    )


class Predictions:
    """A CSV file with each image's path, label and likeliest classes with their probabilities.

    There are five classes, or all where there are fewer, the likeliest first. Replaces `path`;
    UserError where its folder cannot be made.
    """

    SHOWN = 5

    def __init__(self, path: Path, dataset: ImageFolder | SyntheticImages) -> None:
        self._path = path
        self._dataset = dataset
        # One row per image: its index, classes and probabilities.
        self._rows: list[tuple[int, list[int], list[float]]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whether it can be written, before the images are looked at.
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--predictions {path}: {error.strerror or error}") from error

    def add(self, scores: flow.Tensor, batch: Batch) -> None:
        shares = flow.softmax(scores.to(flow.float32), dim=1)
        best, classes = flow.topk(shares, min(self.SHOWN, shares.shape[1]), dim=1)
        columns = (batch.indices, classes.numpy(), best.numpy())
        self._rows += zip(*(column.tolist() for column in columns), strict=True)

    def write(self) -> None:
        """Write the file, in the order of the data set. A collective call."""
        rows: list[Any] = sorted(chain.from_iterable(distributed.all_gather_json(self._rows)))
        if not distributed.is_main():
            return
        names, labels, text = self._dataset.classes, self._dataset.labels, io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        shown = range(1, 1 + len(rows[0][1]))
        heads = [head for n in shown for head in (f"class{n}", f"probability{n}")]
        table.writerow(["image", "label", *heads])
        for index, classes, shares in rows:
            best = zip(classes, shares, strict=True)
            cells = [cell for one, share in best for cell in (names[one], f"{share:.6f}")]
            table.writerow([self._dataset.name(index), names[labels[index]], *cells])
        replace_file(self._path, text.getvalue().encode())
