"""Cross-entropy on hard and soft targets, against PyTorch in float64."""

from __future__ import annotations

import oneflow_accel
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.optim import CrossEntropy, build_loss, hard_labels
from tests.tolerances import assert_close


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    oneflow_accel.select_device()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_to_pytorch_with_gradients(timm_golden, dtype):
    golden = timm_golden["loss"]
    assert len(golden["cases"]) == 4
    for case in golden["cases"]:
        scores = flow.tensor(np.array(golden["scores"], dtype=dtype), requires_grad=True)
        kind = case["targets"]
        targets = flow.tensor(np.array(golden[kind], dtype="int64" if kind == "hard" else dtype))
        loss = CrossEntropy(case["smoothing"])(scores, targets)
        loss.backward()
        assert_close(loss.numpy(), np.array(case["loss"]), dtype=dtype, reduced=35)
        assert_close(scores.grad.numpy(), np.array(case["grad"]), dtype=dtype, reduced=7)


def test_large_scores_do_not_overflow():
    scores = flow.tensor([[1e4, -1e4, 0.0], [1e30, 0.0, -1e30]])
    soft = flow.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    # OneFlow's own softmax, without the plug-in, is off by some 1e-6.
    for targets in (flow.tensor([0, 0]), soft):
        assert CrossEntropy()(scores, targets).numpy() == pytest.approx(0, abs=1e-5)


def test_reductions_and_shapes():
    scores = flow.tensor(np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32))
    labels = flow.tensor([0, 1, 2, 0])
    each = CrossEntropy(0.1, reduction="none")(scores, labels)
    assert each.shape == (4,)
    total = build_loss({"label_smoothing": 0.1}, reduction="sum")(scores, labels)
    assert total.numpy() == pytest.approx(each.numpy().sum(), rel=1e-6)
    with pytest.raises(ValueError, match=r"scores of shape \(4, 3\) and targets of \(3,\)"):
        CrossEntropy()(scores, flow.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "hinge"}, r"loss_fn\.name='hinge': it must be cross_entropy"),
        ({"smoothing": 0.1}, r"smoothing; did you mean loss_fn\.label_smoothing"),
        ({"label_smoothing": 1.0}, r"label_smoothing=1\.0: .* at least 0 and below 1"),
    ],
)
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_loss(config)


def test_configurations():
    for name in ("cross_entropy", "CrossEntropy"):
        assert build_loss({"name": name, "label_smoothing": 0.2}).label_smoothing == 0.2
    assert build_loss({"_target_": "torch.nn.CrossEntropyLoss"}).label_smoothing == 0
    assert build_loss(None).label_smoothing == 0


def test_a_soft_targets_label_is_its_highest_class():
    soft = np.random.default_rng(4).dirichlet(np.ones(12), 50).astype(np.float32)
    np.testing.assert_array_equal(hard_labels(flow.tensor(soft)).numpy(), soft.argmax(axis=1))
    labels = flow.tensor([3, 1])
    assert hard_labels(labels) is labels
