"""Cross entropies against class indices: of logits, and of a linear layer's logits, which never
exist all at once: "cross_entropy", "linear_cross_entropy" and "linear_cross_entropy_mean"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from oneflow_accel.kernels.operators import (
    Operator,
    after,
    differentiable,
    empty_reasons,
    needs_gradient,
    numbers,
    widened,
    with_gradient,
)
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    on_cards,
    register_operation,
)

import oneflow as flow

_IGNORE = {"ignore_index": "int64"}
_CHUNKS = {"ignore_index": "int64", "chunk_rows": "int64"}

_cross_entropy = Operator(
    "oneflow_accel_cross_entropy", ("logits", "label"), ("losses", "lse"), _IGNORE
)
_cross_entropy_grad = Operator(
    "oneflow_accel_cross_entropy_grad",
    ("losses_grad", "logits", "label", "lse"),
    ("logits_grad",),
    _IGNORE,
)
_linear = Operator(
    "oneflow_accel_linear_cross_entropy", ("x", "weight", "label"), ("losses", "lse"), _CHUNKS
)
_linear_grad = Operator(
    "oneflow_accel_linear_cross_entropy_grad",
    ("losses_grad", "x", "weight", "label", "lse"),
    ("x_grad", "weight_grad"),
    _CHUNKS,
)
# The sum of the losses, how many count, and the sum's gradients.
_linear_sum = Operator(
    "oneflow_accel_linear_cross_entropy_sum",
    ("x", "weight", "label"),
    ("total", "count", "x_grad", "weight_grad"),
    _CHUNKS,
)


def cross_entropy(
    logits: flow.Tensor, labels: flow.Tensor, *, ignore_index: int = -100
) -> flow.Tensor:
    """log(sum(exp(row))) - row[label] for each row of logits, 0 where the label is `ignore_index`.

    logits are (rows, classes), labels (rows,) of int64 or int32; the losses are (rows,), float32
    for logits in bfloat16 and else of the logits' dtype. Kept for the gradient are the logits and
    two floats a row. Global rows may be split; classes that are split are gathered.

    ValueError if shapes or dtypes do not fit. A label that is neither a class nor `ignore_index` is
    an IndexError when the result is read (csrc/README.md, "Errors inside kernels").
    """
    shape = tuple(logits.shape)
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"logits {shape} are not (rows, classes) with at least one class")
    _check_labels(labels, shape[0], f"logits {shape}")
    return _operation(logits, labels, ignore_index=ignore_index)


def linear_cross_entropy(
    x: flow.Tensor,
    weight: flow.Tensor,
    labels: flow.Tensor,
    *,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> flow.Tensor:
    """`cross_entropy` of the logits x weight^T, of which at most `chunk_rows` rows exist at a time.

    x is (rows, width), weight (classes, width), of one dtype, labels (rows,) of int64 or int32; the
    losses are (rows,). `chunk_rows` None means as many rows as make 32 MiB of logits. What each
    row's gradient is to be multiplied with is known in the backward pass only, which therefore
    computes the logits again: four products in place of three. Where the mean of the losses is
    wanted, `linear_cross_entropy_mean` needs three.

    Global rows may be split, with a weight that is broadcast, whose gradient is a partial sum then.
    A weight whose classes are split is gathered. Errors as in `cross_entropy`, and ValueError for
    `chunk_rows` below 1.
    """
    x = _checked_linear(x, weight, labels, chunk_rows)
    how = {"ignore_index": ignore_index, "chunk_rows": chunk_rows or 0}
    return _linear_operation(x, weight, labels, **how)


def linear_cross_entropy_mean(
    x: flow.Tensor,
    weight: flow.Tensor,
    labels: flow.Tensor,
    *,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> flow.Tensor:
    """The mean of `linear_cross_entropy`'s losses over the rows that are not ignored, 0-d.

    In a mean all rows have one factor, so the gradients of x and weight are computed in the forward
    pass, while a chunk's logits exist, and multiplied by the factor in the backward pass: three
    products, as of a linear layer, and memory for one chunk and one more gradient of each. Where
    all rows are ignored, or there are none, the mean is NaN, as in `F.cross_entropy`, and the
    gradients are 0. Arguments, global tensors and errors as in `linear_cross_entropy`.
    """
    x = _checked_linear(x, weight, labels, chunk_rows)
    how = {"ignore_index": ignore_index, "chunk_rows": chunk_rows or 0}
    return _mean_operation(x, weight, labels, **how)


def _check_labels(labels: flow.Tensor, rows: int, beside: str) -> None:
    if tuple(labels.shape) != (rows,):
        raise ValueError(f"labels {tuple(labels.shape)} are not ({rows},), as {beside} need them")
    if labels.dtype not in (flow.int64, flow.int32):
        raise ValueError(f"labels are of {labels.dtype}, not of int64 or int32")


def _checked_linear(
    x: flow.Tensor, weight: flow.Tensor, labels: flow.Tensor, chunk_rows: int | None
) -> flow.Tensor:
    """x, under autocast of the weight's dtype."""
    if flow.is_autocast_enabled():
        x = x.to(weight.dtype)
    rows, classes = tuple(x.shape), tuple(weight.shape)
    if len(rows) != 2 or len(classes) != 2 or rows[1] != classes[1] or 0 in classes:
        raise ValueError(
            f"x {rows} and weight {classes} are not (rows, width) and (classes, width) with at "
            "least one class"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is of {x.dtype} and weight of {weight.dtype}")
    _check_labels(labels, rows[0], f"x {rows}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows {chunk_rows} is below 1")
    return x


def _reference(logits: flow.Tensor, labels: flow.Tensor, *, ignore_index: int) -> flow.Tensor:
    if logits.dtype == flow.bfloat16:
        logits = logits.to(flow.float32)
    return flow.nn.functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="none"
    )


def _linear_reference(
    x: flow.Tensor,
    weight: flow.Tensor,
    labels: flow.Tensor,
    *,
    ignore_index: int,
    chunk_rows: int = 0,
) -> flow.Tensor:
    if x.shape[0] == 0:
        # OneFlow's own kernel for products of float64 ends the process without rows.
        return x[:, 0] + weight.sum() * 0
    logits = flow._C.matmul(x, weight, transpose_b=True)
    return _reference(logits, labels, ignore_index=ignore_index)


def _mean_reference(
    x: flow.Tensor, weight: flow.Tensor, labels: flow.Tensor, **attributes: int
) -> flow.Tensor:
    losses = _linear_operation(x, weight, labels, **attributes)
    return losses.sum() / (labels != attributes["ignore_index"]).to(losses.dtype).sum()


_operation = register_operation(
    "cross_entropy",
    reference=_reference,
    doc="log(sum(exp(row))) - row[label] of logits (rows, classes) and labels (rows,) to (rows,), "
    "0 where the label is ignore_index",
    lacks=on_cards(
        "no such operator there: log_softmax and nll, which keep a second matrix of the logits' "
        "size"
    ),
)
_NO_LINEAR = on_cards(
    "no such operator there: products and cross entropies of a chunk of rows at a time"
)
_linear_operation = register_operation(
    "linear_cross_entropy",
    reference=_linear_reference,
    doc="cross_entropy of x weight^T, a chunk of rows at a time: x (rows, width), weight "
    "(classes, width) and labels (rows,) to (rows,)",
    lacks=_NO_LINEAR,
)
_mean_operation = register_operation(
    "linear_cross_entropy_mean",
    reference=_mean_reference,
    doc="the mean of linear_cross_entropy over the rows that are not ignored, with its gradients "
    "made in the forward pass",
    lacks=_NO_LINEAR,
)


# Keeps no probabilities.
cpu_implementation("cross_entropy", _cross_entropy)(
    with_gradient("fused_cross_entropy", _cross_entropy, _cross_entropy_grad, autocast=None)
)
# Keeps no logits: the backward pass computes them again.
cpu_implementation("linear_cross_entropy", _linear, dtypes=(flow.float32,))(
    with_gradient("chunked_linear_cross_entropy", _linear, _linear_grad)
)


def _mean_backward(kept: Any, mean_grad: flow.Tensor, **_: int) -> tuple[flow.Tensor | None, ...]:
    count, *grads = kept
    # All are 0 where nothing counts: 0 / 0 would make them NaN.
    factor = mean_grad / count.clamp(min=1.0)
    return (*(grad * factor for grad in grads), None)


@differentiable(_linear_sum.name, _mean_backward)
def _mean_with_gradients(*tensors: flow.Tensor, **attributes: int) -> Any:
    total, *kept = _linear_sum(*tensors, **attributes)
    return total / kept[0], kept


@cpu_implementation("linear_cross_entropy_mean", _linear_sum, dtypes=(flow.float32,))
def chunked_linear_cross_entropy_mean(*tensors: flow.Tensor, **attributes: int) -> flow.Tensor:
    """Keeps the gradients and no logits."""
    function = _mean_with_gradients if needs_gradient(*tensors) else _mean_reference
    return function(*tensors, **attributes)


# Where a device has no kernel: a chunk of rows at a time, computed again in the backward pass.
_BYTES = 32 << 20


def _chunks(
    x: flow.Tensor, weight: flow.Tensor, chunk_rows: int, *others: flow.Tensor
) -> Iterator[tuple[flow.Tensor, ...]]:
    """The same rows of x and others, (parts, rows, ...): of each part of x that a process holds, so
    that no row moves."""
    parts = 1
    if x.is_global:
        sizes = zip(x.placement.ranks.shape, x.sbp, strict=True)
        parts = math.prod(size for size, sbp in sizes if sbp == flow.sbp.split(0))
    parts = 1 if x.shape[0] % parts else parts
    size = chunk_rows or max(1, _BYTES // (4 * weight.shape[0]))
    split = [each.reshape(parts, -1, *each.shape[1:]) for each in (x, *others)]
    for start in range(0, x.shape[0] // parts, size):
        yield tuple(each[:, start : start + size] for each in split)


def _gradient_by_chunks(
    kept: Any, losses_grad: flow.Tensor, *, ignore_index: int, chunk_rows: int
) -> tuple[flow.Tensor | None, ...]:
    x, weight, labels = kept
    multiply, classes = flow._C.matmul, numbers(weight.shape[0], x)

    def of_chunk(
        rows: flow.Tensor, label: flow.Tensor, factor: flow.Tensor
    ) -> tuple[flow.Tensor, flow.Tensor]:
        rows, label, factor = (each.flatten(0, 1) for each in (rows, label, factor))
        grad = flow.softmax(widened(multiply(rows, weight, transpose_b=True)), dim=-1)
        grad = grad - (label == classes).to(grad.dtype)
        # Not a product: the factor of a mean over nothing is infinite.
        factor = widened(factor)
        factor = flow.where(label != ignore_index, factor, flow.zeros_like(factor))
        grad = (grad * factor).to(x.dtype)
        return multiply(grad, weight), widened(multiply(grad, rows, transpose_a=True))

    x_grads: list[flow.Tensor] = []
    total: Any = None
    columns = labels.to(flow.int32).reshape(-1, 1), losses_grad.reshape(-1, 1)
    for rows, label, factor in _chunks(x, weight, chunk_rows, *columns):
        previous = x_grads[-1] if x_grads else factor
        rows, label = after(rows, previous), after(label, previous)
        x_grad, found = of_chunk(rows, label, factor)
        x_grads.append(x_grad.reshape(*rows.shape))
        total = found if total is None else total + found
    return flow.cat(x_grads, dim=1).flatten(0, 1), total.to(weight.dtype), None


@implementation("linear_cross_entropy", not_supported_reasons=empty_reasons)
@differentiable(_linear.name, _gradient_by_chunks)
def linear_cross_entropy_by_chunks(
    x: flow.Tensor, weight: flow.Tensor, labels: flow.Tensor, *, ignore_index: int, chunk_rows: int
) -> Any:
    """Keeps no logits: the backward pass computes them again."""
    losses: list[flow.Tensor] = []
    for rows, label in _chunks(x, weight, chunk_rows, labels):
        rows = after(rows, losses[-1].unsqueeze(-1)) if losses else rows
        found = _linear_reference(
            rows.flatten(0, 1), weight, label.flatten(), ignore_index=ignore_index
        )
        losses.append(found.reshape(*label.shape))
    return flow.cat(losses, dim=1).flatten(), (x, weight, labels)
