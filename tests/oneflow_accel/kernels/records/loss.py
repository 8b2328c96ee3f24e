"""Cross entropies over class indices and over distributions, and the negative log likelihood."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.loss import (
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_mean,
)

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Layout, Record, case

Gradients = tuple[np.ndarray | None, ...]
BOTH = ("float32", "bfloat16")


def _labels(*shape: int, classes: int, dtype: Any = np.int64) -> Any:
    return lambda generator: generator.integers(0, classes, shape).astype(dtype)


def _some_ignored(rows: int, classes: int, ignored: int) -> Any:
    def make(generator: np.random.Generator) -> np.ndarray:
        labels = generator.integers(0, classes, rows)
        labels[::3] = ignored
        return labels

    return make


def _distribution(*shape: int) -> Any:
    return lambda generator: generator.dirichlet(np.ones(shape[-1]), shape[:-1])


def _positive(*shape: int) -> Any:
    return lambda generator: generator.uniform(0.2, 2.0, shape)


def _one_hot(label: np.ndarray, classes: int) -> np.ndarray:
    """[..., classes]; zeros where the label is no class."""
    return (label[..., None] == np.arange(classes)).astype(np.float64)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _picked(x: np.ndarray, one_hot: np.ndarray) -> np.ndarray:
    """x where one_hot is not 0, times it; what is not picked may be infinite."""
    return np.where(one_hot == 0, 0.0, x * one_hot)


def _sparse(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    return -_picked(_log_softmax(x), _one_hot(label, x.shape[-1])).sum(-1)


def _sparse_grad(dy: np.ndarray, x: np.ndarray, label: np.ndarray) -> Gradients:
    return dy[..., None] * (np.exp(_log_softmax(x)) - _one_hot(label, x.shape[-1])), None


def _dense(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    # OneFlow's kernels take no probability for less than 1e-20.
    return -(np.maximum(_log_softmax(x), np.log(1e-20)) * label).sum(-1)


def _dense_grad(dy: np.ndarray, x: np.ndarray, label: np.ndarray) -> Gradients:
    # The operator's own gradient, which counts on labels that sum up to 1.
    return dy[..., None] * (np.exp(_log_softmax(x)) - label), None


def _nll(
    x: np.ndarray, label: np.ndarray, *weight: np.ndarray, ignore_index: int = -100
) -> np.ndarray:
    one_hot = _one_hot(np.where(label == ignore_index, -1, label), x.shape[-1])
    return -_picked(x * (weight[0] if weight else 1.0), one_hot).sum(-1)


def _nll_grad(
    dy: np.ndarray, x: np.ndarray, label: np.ndarray, *weight: np.ndarray, ignore_index: int = -100
) -> Gradients:
    one_hot = _one_hot(np.where(label == ignore_index, -1, label), x.shape[-1])
    dx = -_picked(dy[..., None] * (weight[0] if weight else 1.0), one_hot)
    return (dx, None, *(None for _ in weight))


def _cross_entropy(
    x: np.ndarray,
    label: np.ndarray,
    *weight: np.ndarray,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> np.ndarray:
    """The mean over the labels that count, weighted."""
    classes = x.shape[-1]
    of_class = weight[0] if weight else np.ones(classes)
    counts = (label != ignore_index)[:, None]
    one_hot = _one_hot(label, classes) * counts
    target = (1 - label_smoothing) * one_hot + label_smoothing / classes * counts
    return -_picked(_log_softmax(x) * of_class, target).sum() / _picked(of_class, one_hot).sum()


def _cross_entropy_grad(
    dy: np.ndarray,
    x: np.ndarray,
    label: np.ndarray,
    *weight: np.ndarray,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Gradients:
    classes = x.shape[-1]
    of_class = weight[0] if weight else np.ones(classes)
    counts = (label != ignore_index)[:, None]
    one_hot = _one_hot(label, classes) * counts
    target = (1 - label_smoothing) * _picked(of_class, one_hot)
    if label_smoothing:
        target += label_smoothing / classes * counts * of_class
    dx = np.exp(_log_softmax(x)) * target.sum(-1, keepdims=True) - target
    return (dy * dx / _picked(of_class, one_hot).sum(), None, *(None for _ in weight))


def _row_losses(x: np.ndarray, label: np.ndarray, ignore_index: int = -100) -> np.ndarray:
    return np.where(label == ignore_index, 0.0, _sparse(x, label))


def _row_losses_grad(
    dy: np.ndarray, x: np.ndarray, label: np.ndarray, ignore_index: int = -100
) -> Gradients:
    dx = _sparse_grad(dy, x, label)[0]
    return np.where((label == ignore_index)[:, None], 0.0, dx), None


def _linear(
    x: np.ndarray,
    weight: np.ndarray,
    label: np.ndarray,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> np.ndarray:
    return _row_losses(x @ weight.T, label, ignore_index)


def _linear_grad(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    label: np.ndarray,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> Gradients:
    logits_grad = _row_losses_grad(dy, x @ weight.T, label, ignore_index)[0]
    return logits_grad @ weight, logits_grad.T @ x, None


def _linear_mean(
    x: np.ndarray, weight: np.ndarray, label: np.ndarray, ignore_index: int = -100, **chunks: Any
) -> np.ndarray:
    return _linear(x, weight, label, ignore_index).sum() / (label != ignore_index).sum()


def _linear_mean_grad(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    label: np.ndarray,
    ignore_index: int = -100,
    **chunks: Any,
) -> Gradients:
    of_each = np.full(len(x), dy / (label != ignore_index).sum())
    return _linear_grad(of_each, x, weight, label, ignore_index)


def _of_one(ignored: int, rows: int) -> Any:
    return lambda generator: np.full(rows, ignored)


def _call_nll(
    x: flow.Tensor, label: flow.Tensor, *weight: flow.Tensor, ignore_index: int = -100
) -> flow.Tensor:
    fixed = weight[0].detach() if weight else None
    return flow._C.nll_loss(x, label, fixed, ignore_index, "none")


def _call_cross_entropy(
    x: flow.Tensor, label: flow.Tensor, *weight: flow.Tensor, **attributes: Any
) -> flow.Tensor:
    fixed = weight[0].detach() if weight else None
    return flow.nn.functional.cross_entropy(x, label, fixed, **attributes)


def _call_dense(x: flow.Tensor, label: flow.Tensor) -> flow.Tensor:
    return flow._C.softmax_cross_entropy(x, label.detach())


_LINEAR_CASES = (
    case("global", (6, 9), (11, 9), _some_ignored(6, 11, -100), chunk_rows=2, reduced=20),
    case("one_row", (1, 5), (17, 5), _labels(1, classes=17), reduced=20),
    case("one_class", (3, 4), (1, 4), _labels(3, classes=1), reduced=4),
    case("no_rows", (0, 4), (5, 4), _labels(0, classes=5)),
    case("int32", (5, 3), (7, 3), _labels(5, classes=7, dtype=np.int32), reduced=7),
    case("all_ignored", (7, 3), (5, 3), _of_one(-1, 7), ignore_index=-1, reduced=5),
    case("one_at_a_time", (5, 6), (9, 6), _labels(5, classes=9), chunk_rows=1, reduced=9),
    case(
        "chunks",
        (37, 33),
        (65, 33),
        _some_ignored(37, 65, 3),
        ignore_index=3,
        chunk_rows=12,
        reduced=65,
    ),
    case("longer_chunk", (7, 6), (9, 6), _labels(7, classes=9), chunk_rows=99, reduced=9),
    # More logits than one chunk has by itself.
    case("many", (1100, 3), (8000, 3), _some_ignored(1100, 8000, -100), reduced=8000),
)

RECORDS = [
    Record(
        "sparse_softmax_cross_entropy",
        ("sparse_softmax_cross_entropy", "sparse_softmax_cross_entropy_grad"),
        flow._C.sparse_softmax_cross_entropy,
        _sparse,
        (
            case("global", (6, 10), _labels(6, classes=10)),
            case("one_class", (3, 1), _labels(3, classes=1)),
            case("int32", (5, 17), _labels(5, classes=17, dtype=np.int32), reduced=17),
            case("three_axes", (2, 3, 33), _labels(2, 3, classes=33), reduced=33),
            case("vocabulary", (8, 50257), _labels(8, classes=50257), reduced=50257),
            case("empty", (0, 5), _labels(0, classes=5)),
        ),
        gradient=_sparse_grad,
        layouts=(Layout(("S(0)", "S(0)"), "S(0)"), Layout(("B", "B"), "B")),
    ),
    Record(
        # Classes split over processes: small operators around these.
        "sparse_softmax_cross_entropy_ms",
        (
            "sparse_cross_entropy_ms",
            "sparse_cross_entropy_ms_grad",
            "sparse_softmax_cross_entropy_ms_grad",
        ),
        flow._C.sparse_softmax_cross_entropy,
        _sparse,
        (case("global", (6, 11), _labels(6, classes=11), reduced=11),),
        gradient=_sparse_grad,
        layouts=(Layout(("S(1)", "B"), "P"),),
    ),
    Record(
        "softmax_cross_entropy",
        ("softmax_cross_entropy", "softmax_cross_entropy_grad"),
        _call_dense,
        _dense,
        (
            case("global", (6, 10), _distribution(6, 10), reduced=10),
            case("three_axes", (2, 3, 33), _distribution(2, 3, 33), reduced=33),
            case("threads", (64, 1000), _distribution(64, 1000), reduced=1000),
        ),
        gradient=_dense_grad,
        layouts=(Layout(("S(0)", "S(0)"), "S(0)"),),
    ),
    Record(
        "nll",
        ("nll", "nll_grad"),
        _call_nll,
        _nll,
        (
            case("global", (6, 10), _labels(6, classes=10)),
            case("int32", (5, 17), _labels(5, classes=17, dtype=np.int32)),
            case("weight", (7, 5), _labels(7, classes=5), _positive(5)),
            case("ignored", (7, 5), _some_ignored(7, 5, 255), ignore_index=255),
            case("threads", (4096, 11), _labels(4096, classes=11)),
        ),
        gradient=_nll_grad,
        layouts=(Layout(("S(0)", "S(0)"), "S(0)"), Layout(("S(1)", "B"), "P")),
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        "cross_entropy",
        ("log_softmax", "log_softmax_grad", "nll", "nll_grad"),
        _call_cross_entropy,
        _cross_entropy,
        (
            case("global", (6, 10), _labels(6, classes=10), reduced=10),
            case("weight", (7, 5), _labels(7, classes=5), _positive(5), reduced=5),
            case("ignored", (7, 5), _some_ignored(7, 5, 0), ignore_index=0, reduced=5),
            case("smoothed", (7, 5), _labels(7, classes=5), label_smoothing=0.1, reduced=5),
            case(
                "smoothed_weight_ignored",
                (7, 5),
                _some_ignored(7, 5, -1),
                _positive(5),
                ignore_index=-1,
                label_smoothing=0.2,
                reduced=5,
            ),
        ),
        gradient=_cross_entropy_grad,
    ),
    Record(
        "cross_entropy_rows",
        ("oneflow_accel_cross_entropy", "oneflow_accel_cross_entropy_grad"),
        # The losses are float32.
        lambda x, *args, **attributes: cross_entropy(x, *args, **attributes).to(x.dtype),
        _row_losses,
        (
            case("global", (6, 11), _some_ignored(6, 11, -100), reduced=11),
            case("one_row", (1, 17), _labels(1, classes=17), reduced=17),
            case("one_class", (3, 1), _labels(3, classes=1)),
            case("no_rows", (0, 5), _labels(0, classes=5)),
            case("int32", (5, 17), _labels(5, classes=17, dtype=np.int32), reduced=17),
            case("a_class_ignored", (7, 5), _some_ignored(7, 5, 0), ignore_index=0, reduced=5),
            case("all_ignored", (7, 5), _of_one(-1, 7), ignore_index=-1, reduced=5),
            case("threads", (300, 1000), _some_ignored(300, 1000, -100), reduced=1000),
            case("vocabulary", (8, 50257), _labels(8, classes=50257), reduced=50257),
        ),
        gradient=_row_losses_grad,
        layouts=(Layout(("S(0)", "S(0)"), "S(0)"), Layout(("B", "B"), "B")),
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
    Record(
        "linear_cross_entropy",
        (
            "oneflow_accel_linear_cross_entropy",
            "oneflow_accel_linear_cross_entropy_grad",
        ),
        linear_cross_entropy,
        _linear,
        _LINEAR_CASES,
        gradient=_linear_grad,
        layouts=(
            Layout(("S(0)", "B", "S(0)"), "S(0)"),
            Layout(("B", "B", "B"), "B"),
        ),
        dtypes=("float32", "float64"),
        not_finite=Strictness.REGROUPED,
    ),
    Record(
        "linear_cross_entropy_mean",
        ("oneflow_accel_linear_cross_entropy_sum",),
        linear_cross_entropy_mean,
        _linear_mean,
        [case for case in _LINEAR_CASES if case.name not in ("no_rows", "all_ignored")],
        gradient=_linear_mean_grad,
        layouts=(
            Layout(("S(0)", "B", "S(0)"), "P"),
            Layout(("B", "B", "B"), "B"),
        ),
        dtypes=("float32", "float64"),
        not_finite=Strictness.REGROUPED,
    ),
]
