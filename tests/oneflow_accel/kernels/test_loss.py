"""Losses beyond records: only ignored labels, split classes (see also test_kernel_failures.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oneflow as flow

from tests.launch import run_distributed
from tests.oneflow_accel.kernels.harness import gradients, needs_plugin, random
from tests.tolerances import assert_close

pytestmark = needs_plugin


def test_nothing_but_ignored_labels_has_no_mean() -> None:
    x, label = flow.tensor(random(3, 5)), flow.tensor(np.full(3, -100))
    assert np.isnan(flow.nn.functional.cross_entropy(x, label).numpy())
    total = flow.nn.functional.cross_entropy(x, label, reduction="sum")
    assert total.numpy() == 0.0


def test_gradient_over_distributions() -> None:
    x, dy = random(6, 33), random(6, seed=1)
    label = np.random.default_rng(0).dirichlet(np.ones(33), 6).astype(np.float32)
    (dx,) = gradients(
        lambda logits: flow._C.softmax_cross_entropy(logits, flow.tensor(label)), [x], dy
    )[1]
    e = np.exp(x.astype(np.float64))
    assert_close(dx, dy[:, None] * (e / e.sum(-1, keepdims=True) - label), reduced=33)


def test_sparse_cross_entropy_of_probabilities() -> None:
    prob = np.array([[0.25, 0.75], [1.0, 0.0]], np.float32)
    label, dy = flow.tensor(np.array([1, 1])), np.array([2.0, 1.0], np.float32)
    y, (dx,) = gradients(lambda p: flow._C.sparse_cross_entropy(p, label, 2), [prob], dy)
    assert_close(y, -np.log([0.75, 1e-20]))
    assert_close(dx, np.array([[0.0, -2.0 / 0.75], [0.0, -1e20]]))


_SPLIT_CLASSES = """
import numpy as np
import oneflow_accel
import oneflow as flow
placement = flow.placement("cpu", [0, 1])
rng = np.random.default_rng(0)
x = rng.standard_normal((6, 11)).astype(np.float32)
label = rng.integers(0, 11, 6)
logits = flow.nn.Parameter(flow.tensor(x, placement=placement, sbp=flow.sbp.split(1)))
target = flow.tensor(label, placement=placement, sbp=flow.sbp.broadcast)

class Model(flow.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = logits

    def forward(self, target):
        return flow._C.sparse_softmax_cross_entropy(self.logits, target)

class Step(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.add_optimizer(flow.optim.SGD([logits], lr=1.0))

    def build(self, target):
        loss = self.model(target)
        loss.sum().backward()
        return loss

loss = Step()(target).to_global(sbp=flow.sbp.broadcast).to_local().numpy()
after = logits.to_global(sbp=flow.sbp.broadcast).to_local().numpy()
e = np.exp(x.astype(np.float64))
prob = e / e.sum(-1, keepdims=True)
one_hot = np.eye(11)[label]
assert np.abs(loss + np.log((prob * one_hot).sum(-1))).max() < 1e-5
assert np.abs((x - after) - (prob - one_hot)).max() < 1e-5
print("split classes agree")
"""


def test_split_classes_in_a_graph(tmp_path: Path) -> None:
    script = tmp_path / "split.py"
    script.write_text(_SPLIT_CLASSES)
    process = run_distributed([script], 2)
    assert process.returncode == 0, process.stdout
    assert process.stdout.count("split classes agree") == 2
