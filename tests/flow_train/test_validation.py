"""Validation against numpy."""

from __future__ import annotations

from types import SimpleNamespace

import oneflow_accel
from oneflow_accel.errors import DataError, UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.data.real_labels import RealLabels
from flow_train.steps.eager import broadcast_buffers, data_parallel
from flow_train.task import Evaluation, ImageTask, best_classes, class_scores, count_hits

CLASSES = 7


def _batches(random: np.random.Generator, sizes: tuple[int, ...]) -> list[SimpleNamespace]:
    """The "images" are the scores themselves."""
    return [
        SimpleNamespace(
            images=random.standard_normal((size, CLASSES)).astype(np.float32),
            labels=random.integers(CLASSES, size=size),
        )
        for size in sizes
    ]


def _by_numpy(batches: list[SimpleNamespace]) -> tuple[float, float, float]:
    scores = np.concatenate([batch.images for batch in batches]).astype(np.float64)
    labels = np.concatenate([batch.labels for batch in batches])
    chosen = scores[np.arange(len(labels)), labels]
    losses = np.log(np.exp(scores).sum(axis=1)) - chosen
    ranks = (scores > chosen[:, None]).sum(axis=1)
    return losses.mean(), 100 * (ranks < 1).mean(), 100 * (ranks < 5).mean()


@pytest.mark.parametrize("max_batches", [None, 2])
def test_means_are_over_images_and_not_over_batches(max_batches):
    backend = oneflow_accel.select_device()
    batches = _batches(np.random.default_rng(0), (8, 8, 3))
    found = ImageTask().evaluate(nn.Identity(), batches, backend, max_batches=max_batches)
    loss, acc1, acc5 = _by_numpy(batches[:max_batches])
    assert found.count == sum(len(batch.labels) for batch in batches[:max_batches])
    np.testing.assert_allclose(list(found.as_logged().values()), [loss, acc1, acc5], rtol=1e-6)


def test_own_criterion_is_summed_up():
    backend = oneflow_accel.select_device()
    batches = _batches(np.random.default_rng(1), (4, 2))
    task = ImageTask(validation=lambda scores, labels: labels.sum().to(scores.dtype))
    found = task.evaluate(nn.Identity(), batches, backend)
    assert found["loss"] == pytest.approx(np.mean(np.concatenate([b.labels for b in batches])))
    with pytest.raises(DataError, match="no images to evaluate"):
        task.evaluate(nn.Identity(), [], backend)


def test_few_classes_have_fewer_than_five_best():
    best = best_classes(flow.tensor([[0.1, 0.9], [0.8, 0.2]]))
    top1, top5 = count_hits(best, flow.tensor([1, 1]))
    assert (float(top1.numpy()), float(top5.numpy())) == (1, 2)
    # Scores of auxiliary heads are left out, and scores of no class refused.
    scores, other = flow.zeros(2, 3), flow.ones(2, 3)
    assert class_scores((scores, other)) is scores
    assert class_scores(scores) is scores
    with pytest.raises(UserError, match=r"\(2, 0\): the images are too small"):
        class_scores(flow.zeros(2, 0))


def test_one_process_needs_no_wrapping():
    model = nn.BatchNorm1d(3)
    assert data_parallel(model) is model
    broadcast_buffers(model)


def test_real_labels_count_beside_the_others():
    """Three images of eleven have no label; the batches come in another order than the data set."""
    backend = oneflow_accel.select_device()
    random = np.random.default_rng(2)
    batches = _batches(random, (8, 3))
    order = random.permutation(11)
    batches[0].indices, batches[1].indices = order[:8], order[8:]
    lists = [[], [1], [2, 3], [], [0, 4, 6], [5], [], [6], [0], [1, 2, 3], [4]]
    seen = []
    found = ImageTask(real_labels=RealLabels(lists)).evaluate(
        nn.Identity(),
        batches,
        backend,
        watch=lambda tally: seen.append((tally.batches, tally.total())),
    )
    scores = np.concatenate([batch.images for batch in batches])
    best = np.argsort(-scores, axis=1)[:, :5]
    hits = [
        (row[0] in lists[i], bool(set(row) & set(lists[i])))
        for row, i in zip(best.tolist(), order, strict=True)
        if lists[i]
    ]
    first, among = (100 * np.mean(column) for column in zip(*hits, strict=True))
    assert found.sums["real_acc1"][1] == 8
    *others, real1, real5 = found.as_logged().values()
    np.testing.assert_allclose([real1, real5], [first, among], rtol=1e-6)
    assert f"Real@1 {first:.3f} Real@5 {among:.3f}" in str(found)
    np.testing.assert_allclose(others, _by_numpy(batches), rtol=1e-6)
    assert [(number, so_far.count) for number, so_far in seen] == [(1, 8), (2, 11)]
    np.testing.assert_allclose(seen[0][1]["acc1"], _by_numpy(batches[:1])[1], rtol=1e-6)
    assert seen[1][1] == found


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_loss_that_is_no_number_is_refused(loss):
    with pytest.raises(UserError, match=f"is {loss}"):
        Evaluation(ImageTask(), {"loss": (loss, 120.0)}).check()
    Evaluation(ImageTask(), {"loss": (84.0, 120.0)}).check()
