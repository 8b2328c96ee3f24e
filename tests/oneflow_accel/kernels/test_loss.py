"""Losses beyond records: only ignored labels, split classes, large logits, errors, memory (see also
test_kernel_failures.py)."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.kernels import loss, registry
from oneflow_accel.kernels.loss import (
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_mean,
)

import numpy as np
import oneflow as flow
import pytest

from tests.oneflow_accel.kernels.harness import (
    as_held,
    gradients,
    needs_plugin,
    random,
)
from tests.oneflow_accel.kernels.records import loss as record
from tests.tolerances import assert_close

pytestmark = needs_plugin


def test_nothing_but_ignored_labels_has_no_mean() -> None:
    x, label = flow.tensor(random(3, 5)), flow.tensor(np.full(3, -100))
    assert np.isnan(flow.nn.functional.cross_entropy(x, label).numpy())
    total = flow.nn.functional.cross_entropy(x, label, reduction="sum")
    assert total.numpy() == 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_bfloat16_without_autocast(weighted: bool, reduction: str) -> None:
    x, label = as_held(random(64, 10), "bfloat16"), np.arange(64) % 10
    label[5] = -100
    weight = flow.tensor(np.linspace(0.5, 1.5, 10, dtype=np.float32)) if weighted else None

    def run(logits: flow.Tensor) -> flow.Tensor:
        return flow.nn.functional.cross_entropy(
            logits,
            flow.tensor(label),
            None if weight is None else weight.to(logits.dtype),
            reduction=reduction,
        )

    # Of each row of a mean as large as of a sum.
    dy = np.full((64,) if reduction == "none" else (), 64.0 if reduction == "mean" else 1.0)
    y, (dx,) = gradients(run, [x], dy.astype(np.float32), ["bfloat16"])
    expected, (expected_dx,) = gradients(run, [x], dy.astype(np.float32))
    assert_close(y, expected, dtype="bfloat16")
    assert_close(dx, expected_dx, dtype="bfloat16")


def test_sparse_cross_entropy_of_probabilities() -> None:
    prob = np.array([[0.25, 0.75], [1.0, 0.0]], np.float32)
    label, dy = flow.tensor(np.array([1, 1])), np.array([2.0, 1.0], np.float32)
    y, (dx,) = gradients(lambda p: flow._C.sparse_cross_entropy(p, label, 2), [prob], dy)
    assert_close(y, -np.log([0.75, 1e-20]))
    assert_close(dx, np.array([[0.0, -2.0 / 0.75], [0.0, -1e20]]))


# Exponentials of such logits overflow or vanish; a single float of log(sum(exp)) would be off by
# 5e-4.
@pytest.mark.parametrize(("offset", "scale"), [(1e4, 1.0), (-1e4, 1.0), (0.0, 1e4), (3e38, 0.0)])
def test_large_logits(offset: float, scale: float) -> None:
    x = (offset + scale * random(9, 33)).astype(np.float32)
    label = np.arange(9) % 7
    label[4] = -100
    dy = random(9, seed=1)
    y, (dx,) = gradients(lambda t: cross_entropy(t, flow.tensor(label)), [x], dy)
    wide = x.astype(np.float64)
    assert_close(y, record._row_losses(wide, label), reduced=33)
    assert_close(dx, record._row_losses_grad(dy, wide, label)[0], reduced=33)


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_large_logits_of_a_linear_layer(chunk_rows: int | None) -> None:
    # Whole numbers: the products are exact in float32 too.
    generator = np.random.default_rng(0)
    x = generator.integers(-50, 50, (9, 33)).astype(np.float32)
    weight = generator.integers(-9, 9, (17, 33)).astype(np.float32)
    label, dy = generator.integers(0, 17, 9), random(9, seed=1)
    wide = x.astype(np.float64), weight.astype(np.float64), label
    for call, reference, gradient, weights in (
        (linear_cross_entropy, record._linear, record._linear_grad, dy),
        (linear_cross_entropy_mean, record._linear_mean, record._linear_mean_grad, dy[0]),
    ):

        def fn(a: flow.Tensor, b: flow.Tensor, call: Callable[..., flow.Tensor] = call):
            return call(a, b, flow.tensor(label), chunk_rows=chunk_rows)

        y, grads = gradients(fn, [x, weight], np.asarray(weights))
        assert_close(y, reference(*wide), reduced=33)
        for mine, expected in zip(grads, gradient(weights, *wide), strict=False):
            assert_close(mine, expected, reduced=33)


@pytest.mark.parametrize("rows", [0, 5])
def test_the_mean_of_nothing_has_no_gradient(rows: int) -> None:
    label = flow.tensor(np.full(rows, -100))
    arrays = [random(rows, 4), random(7, 4)]
    for off in ((), ("chunked_linear_cross_entropy", "chunked_linear_cross_entropy_mean")):
        with registry.disabled(*off):
            y, grads = gradients(
                lambda x, w: linear_cross_entropy_mean(x, w, label), arrays, np.ones((), np.float32)
            )
        assert np.isnan(y)
        if rows or not off:
            assert all(not grad.any() for grad in grads)


def test_without_a_gradient_the_results_are_the_same() -> None:
    x, weight, label = random(37, 33), random(65, 33), np.arange(37)
    label[::5] = -100
    tensors = [flow.tensor(a) for a in (x, weight, label)]
    for call in (linear_cross_entropy, linear_cross_entropy_mean):
        alone = call(*tensors, chunk_rows=8).numpy()
        x_needs, weight_needs = (t.detach().requires_grad_() for t in tensors[:2])
        with_gradient = call(x_needs, weight_needs, tensors[2], chunk_rows=8)
        assert_close(with_gradient.numpy(), alone.astype(np.float64), reduced=33)
        # Of one input only.
        call(x_needs, tensors[1], tensors[2]).sum().backward()
        assert x_needs.grad is not None


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    x, weight, label = flow.ones(3, 4), flow.ones(5, 4), flow.tensor([0, 1, 2])
    for wrong, text in [
        ((x[0], label), r"logits \(4,\) are not \(rows, classes\)"),
        ((flow.ones(3, 0), label), r"logits \(3, 0\) are not \(rows, classes\) with at least one"),
        ((x, label[:2]), r"labels \(2,\) are not \(3,\), as logits \(3, 4\) need them"),
        ((x, label.to(flow.float32)), "labels are of oneflow.float32, not of int64 or int32"),
    ]:
        with pytest.raises(ValueError, match=text):
            cross_entropy(*wrong)
    for call in (linear_cross_entropy, linear_cross_entropy_mean):
        for wrong, text in [
            ((x[0], weight, label), r"x \(4,\) and weight \(5, 4\) are not \(rows, width\)"),
            ((x, flow.ones(5, 3), label), r"x \(3, 4\) and weight \(5, 3\) are not"),
            ((x, flow.ones(0, 4), label), "with at least one class"),
            ((x, weight.to(flow.float64), label), "x is of oneflow.float32 and weight of"),
            ((x, weight, label[:2]), r"labels \(2,\) are not \(3,\), as x \(3, 4\) need them"),
            ((x, weight, label > 0), "labels are of oneflow.bool"),
        ]:
            with pytest.raises(ValueError, match=text):
                call(*wrong)
        with pytest.raises(ValueError, match="chunk_rows 0 is below 1"):
            call(x, weight, label, chunk_rows=0)


def test_the_operators_check_shapes_too() -> None:
    x, weight, label = flow.ones(3, 4), flow.ones(5, 4), flow.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match="a cross entropy needs logits"):
        loss._cross_entropy(x, label[:2], ignore_index=-1)
    with pytest.raises(RuntimeError, match="a linear cross entropy needs x"):
        loss._linear(x, weight[:, :3], label, ignore_index=-1, chunk_rows=0)
    with pytest.raises(RuntimeError, match="of one dtype"):
        loss._linear(x, weight.to(flow.float64), label, ignore_index=-1, chunk_rows=0)


def test_a_label_that_is_no_class() -> None:
    x, weight = flow.ones(3, 4), flow.ones(5, 4)
    for call, name in (
        (lambda label: cross_entropy(x, label), "cross_entropy"),
        (lambda label: linear_cross_entropy(x, weight, label), "linear_cross_entropy"),
        (
            lambda label: linear_cross_entropy_mean(x.clone().requires_grad_(), weight, label),
            "linear_cross_entropy_sum",
        ),
    ):
        classes = 4 if name == "cross_entropy" else 5
        for wrong in (-1, classes):
            with pytest.raises(IndexError) as caught:
                call(flow.tensor([0, wrong, 1])).numpy()
            text = f"oneflow_accel_{name}: label {wrong} of row 1 is out of range for {classes} "
            assert text in str(caught.value)
        call(flow.tensor([0, -100, classes - 1])).numpy()


def test_reference_and_kernel_agree() -> None:
    x, dy = random(9, 33), random(9, seed=1)
    label = np.arange(9)
    label[::4] = 32
    for ignored in (-100, 32):
        y, (dx,) = gradients(
            lambda t, i=ignored: cross_entropy(t, flow.tensor(label), ignore_index=i), [x], dy
        )
        expected, (expected_dx,) = gradients(
            lambda t, i=ignored: loss._reference(t, flow.tensor(label), ignore_index=i), [x], dy
        )
        assert_close(y, expected, reduced=33)
        assert_close(dx, expected_dx, reduced=33)
