"""Errors inside kernels: raised in Python at the next wait, once, and nothing is made of them.

In processes of their own: on a thread of OneFlow's an exception would end the process.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin

_PREAMBLE = """
import json
import oneflow_accel
from oneflow_accel.kernels import plugin
import numpy as np
import oneflow as flow
from oneflow import nn

F = nn.functional


def caught(wait):
    try:
        wait()
    except Exception as error:
        for kind in (IndexError, RuntimeError, Exception):
            if isinstance(error, kind):
                return kind.__name__, str(error)
    return None, ""


def answer(**values):
    # One write: the lines of two processes must not run into one another.
    print(f"answer {json.dumps(values)}\\n", end="", flush=True)
"""


def run(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    return run_process(["-c", _PREAMBLE + script], **options)  # type: ignore[arg-type]


def answers(process: subprocess.CompletedProcess[str]) -> list[dict]:
    assert process.returncode == 0, process.stdout
    lines = re.findall(r"^answer (.*)$", process.stdout, re.MULTILINE)
    assert lines, process.stdout
    return [json.loads(line) for line in lines]


# What is called with indices that do not fit, and the text that must come of it.
_INDICES = {
    "flow._C.gather(flow.ones(7, 2), flow.tensor([3, -1]), axis=0)": (
        "gather: index -1 at position 1 is out of range for 7 rows"
    ),
    "flow._C.gather(flow.ones(7, 2), flow.tensor([3, 7], dtype=flow.int32), axis=0)": (
        "gather: index 7 at position 1 is out of range for 7 rows"
    ),
    "flow._C.gather(flow.ones(2, 7), flow.tensor([[0] * 40 + [9]] * 2), axis=1)": (
        "gather: index 9 at position 40 is out of range for 7 rows"
    ),
    "nn.Embedding(5, 3)(flow.tensor([0, 7]))": (
        "gather: index 7 at position 1 is out of range for 5 rows"
    ),
    "nn.Embedding(5, 3, padding_idx=0)(flow.tensor([0, 7]))": (
        "embedding: index 7 at position 1 is out of range for 5 rows"
    ),
    "F.cross_entropy(flow.rand(2, 3), flow.tensor([0, 5]))": (
        "nll: label 5 of row 1 is out of range for 3 classes"
    ),
    "F.cross_entropy(flow.rand(9999, 3), flow.tensor([0] * 9998 + [-1]))": (
        "nll: label -1 of row 9998 is out of range for 3 classes"
    ),
    "nn.NLLLoss()(flow.rand(2, 3), flow.tensor([4, 0]))": (
        "nll: label 4 of row 0 is out of range for 3 classes"
    ),
    "flow._C.sparse_softmax_cross_entropy(flow.rand(3, 5), flow.tensor([0, 5, 1]))": (
        "sparse_softmax_cross_entropy: label 5 of row 1 is out of range for 5 classes"
    ),
    "flow._C.sparse_cross_entropy(flow.rand(3, 5), flow.tensor([0, -1, 1]), 5)": (
        "sparse_cross_entropy: label -1 of row 1 is out of range for 5 classes"
    ),
}
_INDEX_SCRIPT = """
x = np.arange(12, dtype=np.float32).reshape(4, 3)
for call in {calls!r}:
    out = eval(call)
    kind, message = caught(out.numpy)
    again = caught(flow._oneflow_internal.eager.Sync)[0]
    right = flow._C.gather(flow.tensor(x), flow.tensor([3, 0]), axis=0).numpy()
    right = bool((right == x[[3, 0]]).all())
    answer(call=call, kind=kind, message=message, again=again, right=right)
"""


def test_an_index_out_of_range_is_an_index_error_that_can_be_caught() -> None:
    found = answers(run(_INDEX_SCRIPT.format(calls=list(_INDICES))))
    assert len(found) == len(_INDICES)
    for row in found:
        assert row["kind"] == "IndexError", row
        assert _INDICES[row["call"]] in row["message"], row
        assert row["message"].isprintable(), row
        assert row["again"] is None, row
        assert row["right"], row


def test_in_a_graph_and_the_graph_goes_on() -> None:
    script = """
class Graph(nn.Graph):
    def build(self, table, indices, logits):
        rows = flow._C.gather(table, indices, axis=0)
        return rows, F.cross_entropy(logits, indices)


graph, table, logits = Graph(), flow.rand(7, 2), flow.rand(2, 9)
for index in (3, 8, 9, 2):
    rows, loss = graph(table, flow.tensor([0, index]), logits)
    kind, message = caught(loss.item)
    right = kind is not None or bool((rows.numpy() == table.numpy()[[0, index]]).all())
    answer(kind=kind, message=message, right=right)
"""
    found = answers(run(script))
    assert [row["kind"] for row in found] == [None, "IndexError", "IndexError", None]
    assert "gather: index 8 at position 1 is out of range for 7 rows" in found[1]["message"]
    assert all(row["right"] for row in found)


def test_a_program_that_never_waits_fails_at_its_end() -> None:
    process = run("y = nn.Embedding(5, 3)(flow.tensor([0, 7]))\nprint('last line')")
    assert process.returncode == 1
    assert "last line" in process.stdout
    assert "gather: index 7 at position 1 is out of range for 5 rows" in process.stdout


def test_a_wait_raises_it_once_for_all_that_were_asked_for(tmp_path: Path) -> None:
    script = f"""
backend = oneflow_accel.select_device("cpu")
layer = nn.Embedding(5, 3)
for wait in (backend.synchronize, backend.empty_cache):
    layer(flow.tensor([0, 7]))
    answer(first=caught(wait)[0], second=caught(wait)[0])
a, b = layer(flow.tensor([0, 7])), layer(flow.tensor([0, 8]))
first, second = caught(a.numpy), caught(b.numpy)
answer(first=first[0], second=second[0], text=first[1], zeros=float(abs(b.numpy()).sum()))
# No checkpoint is made of a wrong step.
layer(flow.tensor([0, 7]))
first = caught(lambda: flow.save(layer.state_dict(), {str(tmp_path / "a")!r}))[0]
answer(first=first, second=None)
flow.save(layer.state_dict(), {str(tmp_path / "b")!r})
answer(saved=sorted(flow.load({str(tmp_path / "b")!r})))
"""
    *found, last = answers(run(script))
    assert [(row["first"], row["second"]) for row in found] == [("IndexError", None)] * 4
    assert "index 7" in found[2]["text"]
    assert found[2]["zeros"] == 0
    assert last["saved"] == ["weight"]


_OPTIMIZERS = {
    "SGD": "flow.optim.SGD(p, lr=0.1)",
    "momentum": "flow.optim.SGD(p, lr=0.1, momentum=0.9)",
    # Bias correction counts the steps in Python, the failed one too.
    "Adam": "flow.optim.Adam(p, lr=0.1, do_bias_correction=False)",
    "AdamW": "flow.optim.AdamW(p, lr=0.1, weight_decay=0.1, do_bias_correction=False)",
    "Adagrad": "flow.optim.Adagrad(p, lr=0.1)",
    "RMSprop": "flow.optim.RMSprop(p, lr=0.1)",
    "Adadelta": "flow.optim.Adadelta(p, lr=0.1)",
    "LAMB": "flow.optim.LAMB(p, lr=0.1, weight_decay=0.1, do_bias_correction=False)",
}
_OPTIMIZER_SCRIPT = """
x = flow.tensor(np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4))
good, bad = flow.tensor([0, 2]), flow.tensor([0, 3])


def train(make, labels, graph_mode):
    layer = nn.Linear(4, 3)
    for i, parameter in enumerate(layer.parameters()):
        value = np.linspace(-1, 1, parameter.numel(), dtype=np.float32).reshape(parameter.shape)
        parameter.data.copy_(flow.tensor(value))
    p = list(layer.parameters())
    optimizer = eval(make)

    class Step(nn.Graph):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.add_optimizer(optimizer)

        def build(self, x, label):
            loss = F.cross_entropy(self.layer(x), label)
            loss.backward()
            return loss

    graph = Step() if graph_mode else None
    raised = []
    for label in labels:
        if graph is not None:
            loss = graph(x, label)
        else:
            loss = F.cross_entropy(layer(x), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        raised.append(caught(loss.item)[0])
    return raised, np.concatenate([q.numpy().ravel() for q in p])


for make in {makes!r}:
    raised, weights = train(make, [good, bad, good], {graph_mode!r})
    _, expected = train(make, [good, good], {graph_mode!r})
    answer(make=make, raised=raised, equal=bool((weights == expected).all()))
"""


@pytest.mark.parametrize("graph_mode", [False, True])
def test_no_optimizer_steps_on_a_wrong_gradient(graph_mode: bool) -> None:
    names = ["SGD", "momentum", "Adam"] if graph_mode else list(_OPTIMIZERS)
    makes = [_OPTIMIZERS[name] for name in names]
    found = answers(run(_OPTIMIZER_SCRIPT.format(makes=makes, graph_mode=graph_mode), timeout=240))
    assert len(found) == len(makes)
    for row in found:
        assert row["raised"] == [None, "IndexError", None], row
        assert row["equal"], row


def test_exceptions_inside_kernels_and_their_threads_are_raised() -> None:
    script = """
import ctypes
from oneflow_accel.kernels.attention import scaled_dot_product_attention
library = ctypes.CDLL(str(plugin.state().path))
q = flow.rand(2, 4, 64, 32)
image, layer = flow.rand(2, 32, 28, 28), nn.Conv2d(32, 32, 3)


def gradient_of_norm():
    norm = nn.LayerNorm(512)
    norm(flow.rand(600, 512)).sum().backward()
    return norm.weight.grad


calls = {
    "attention": lambda: scaled_dot_product_attention(q, q, q),
    "conv2d": lambda: layer(image),
    "layer_norm": lambda: gradient_of_norm(),
}
for name, call in calls.items():
    library.oneflow_accel_release_scratch()
    library.oneflow_accel_fail_scratch(1000)
    kind, message = caught(lambda: call().numpy())
    library.oneflow_accel_fail_scratch(0)
    found = call().numpy()
    answer(name=name, kind=kind, message=message, works=bool(np.isfinite(found).all()))
"""
    for row in answers(run(script, env={"ONEFLOW_ACCEL_THREADS": "2"})):
        assert row["kind"] == "RuntimeError", row
        assert re.search("oneflow_accel: .*(not enough memory|bad_alloc)", row["message"]), row
        assert row["works"], row


_TWO_PROCESSES = """
from oneflow_accel import distributed, watchdog
layer = nn.Linear(4, 3)
model = nn.parallel.DistributedDataParallel(layer)
optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
label = flow.tensor([0, 3 if flow.env.get_rank() == 1 else 2])
with watchdog.guard():
    for _ in range(3):
        loss = F.cross_entropy(model(flow.rand(2, 4)), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # As before a checkpoint: nobody gets beyond it.
    distributed.settle()
    print("done")
"""


def test_a_failure_in_one_process_ends_all(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(_PREAMBLE + _TWO_PROCESSES)
    process = run_distributed([str(file)], 2, timeout=100)
    assert process.returncode != 0
    assert "nll: label 3 of row 1 is out of range for 3 classes" in process.stdout
    assert "done" not in process.stdout


# Rows of a table and classes of a loss that are split over processes: each knows how many there are
# in all.
_GLOBAL = """
placement, everywhere = flow.placement.all("cpu"), flow.sbp.broadcast
table = flow.ones(8, 2, placement=placement, sbp=flow.sbp.split(0))
logits = flow.ones(2, 8, placement=placement, sbp=flow.sbp.split(1))


def on_all(*values):
    return flow.tensor(values, placement=placement, sbp=everywhere)


def gather(indices):
    return flow._C.gather(table, indices, axis=0)


def loss(label):
    return flow._C.sparse_softmax_cross_entropy(logits, label)


found = []
for call in (gather, loss):
    for index in (5, 8, 5):
        out = call(on_all(0, index)).to_global(sbp=everywhere).to_local()
        found.append(caught(out.numpy))
answer(rank=flow.env.get_rank(), kinds=[kind for kind, _ in found], text=found[1][1] + found[4][1])
"""


def test_tensors_that_are_split_over_processes(tmp_path: Path) -> None:
    file = tmp_path / "split.py"
    file.write_text(_PREAMBLE + _GLOBAL)
    rows = answers(run_distributed([str(file)], 2, timeout=100))
    assert {row["rank"] for row in rows} == {0, 1}
    for row in rows:
        assert row["kinds"] == [None, "IndexError", None] * 2, row
        assert "gather: index 8 at position 1 is out of range for 8 rows" in row["text"]
        assert "label 8 of row 1 is out of range for 8 classes" in row["text"]
