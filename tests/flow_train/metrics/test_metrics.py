"""The metric log survives kills and resumes; the window waits for the device once."""

from __future__ import annotations

import json
import math

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.metrics.log import NonFiniteLossError, RunLog, StepWindow, read_metrics


def test_lines_are_strict_json_on_disk_at_once(tmp_path):
    log = RunLog(tmp_path / "run")
    log.log(10, {"loss": np.float32(1.5), "acc1": 40})
    log.log(10, {"loss": math.nan, "grad_norm": math.inf, "losses": [1.0, math.nan]}, split="val")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.path.open()]
    assert [(line["step"], line["split"], line["values"]) for line in lines] == [
        (10, "train", {"loss": 1.5, "acc1": 40.0}),
        (10, "val", {"loss": None, "grad_norm": None, "losses": [1.0, None]}),
    ]
    assert lines[0]["time"] > 1.6e9
    log.close()


def test_other_processes_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", enabled=False)
    log.log(1, {"loss": 1.0})
    log.truncate(0)
    log.close()
    assert not (tmp_path / "run").exists()


def test_resume_forgets_later_steps_and_an_evaluation_that_is_repeated_stands_once(tmp_path):
    """Killed after it, before a checkpoint said so."""
    log = RunLog(tmp_path)
    for step in (10, 20, 30):
        for split in ("train", "val", "ema"):
            log.log(step, {"loss": 1.0 / step}, split=split)
    log.close()
    resumed = RunLog(tmp_path)
    resumed.truncate(20)
    resumed.log(20, {"loss": 2.5}, split="val")
    resumed.log(30, {"loss": 9.0})
    resumed.close()
    found = [(x["step"], x["split"], x["values"]["loss"]) for x in read_metrics(resumed.path)]
    assert found == [
        *((10, split, 0.1) for split in ("train", "val", "ema")),
        *((20, split, 0.05) for split in ("train", "ema")),
        (20, "val", 2.5),
        (30, "train", 9.0),
    ]
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert scalars == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05)), (30, 9.0)]
    assert [event.step for event in events.Scalars("ema/loss")] == [10, 20]


def test_line_torn_by_a_kill_is_removed(tmp_path):
    log = RunLog(tmp_path)
    log.log(1, {"loss": 1.0})
    log.log(2, {"loss": 2.0})
    log.close()
    data = log.path.read_bytes()
    for cut in (1, 40):
        log.path.write_bytes(data[:-cut])
        again = RunLog(tmp_path)
        again.log(3, {"loss": 3.0})
        again.close()
        assert [line["step"] for line in read_metrics(log.path)] == [1, 3]


def test_unreadable_line_in_the_middle_is_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "split": "train", "time": 0, "values": {}}'
    path.write_text(f'{good}\nnonsense\n{{"step": 2}}\n{good}\n')
    assert len(read_metrics(path)) == 2
    assert "line 2" in caplog.text
    assert "line 3" in caplog.text


def test_window_gives_values_in_the_order_of_steps():
    window = StepWindow()
    weight = flow.ones(3, requires_grad=True)
    for step in range(5, 8):
        loss = (weight * step).sum()
        window.add(step, loss=loss, correct=flow.tensor([step - 5]), lr=0.5**step)
    with pytest.raises(ValueError, match="step 8"):
        window.add(8, loss=1.0, acc1=2.0)
    assert len(window) == 3
    values = window.fetch()
    assert window.steps == [5, 6, 7]
    assert values == {
        "loss": [15.0, 18.0, 21.0],
        "correct": [0.0, 1.0, 2.0],
        "lr": [0.5**step for step in range(5, 8)],
    }
    assert len(window) == 0
    assert window.fetch() == {}
    window.add(9, loss=flow.tensor(1.0))
    assert window.steps == [9]


@pytest.mark.parametrize("sbp", [flow.sbp.broadcast, flow.sbp.partial_sum])
def test_window_takes_global_tensors_of_a_graph(sbp):
    """Outputs of later runs of the graph do not overwrite those that wait in the window."""

    class Scale(flow.nn.Graph):
        def build(self, x):
            return (x * 2).sum()

    graph, placement, window = Scale(), flow.placement("cpu", [0]), StepWindow()
    for step in range(1, 4):
        x = flow.full((4,), float(step)).to_global(placement=placement, sbp=flow.sbp.broadcast)
        loss = graph(x)
        assert loss.is_global
        window.add(step, loss=loss.to_global(sbp=sbp))
    assert window.fetch() == {"loss": [8.0, 16.0, 24.0]}


def test_window_copies_to_the_host_once(monkeypatch):
    window = StepWindow()
    copies = []
    monkeypatch.setattr(flow.Tensor, "item", lambda tensor: pytest.fail("item() waits"))
    to_numpy = flow.Tensor.numpy
    monkeypatch.setattr(flow.Tensor, "numpy", lambda t: copies.append(t.shape) or to_numpy(t))
    for step in range(10):
        window.add(step, loss=flow.tensor(1.0), correct=flow.tensor(3))
    assert copies == []
    window.fetch()
    assert copies == [(20,)]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_first_step_that_is_not_finite_is_named(value):
    window = StepWindow()
    for step, loss in enumerate([1.0, 2.0, value, 3.0, value], start=100):
        window.add(step, loss=flow.tensor(loss), acc1=1.0)
    with pytest.raises(NonFiniteLossError, match=r"loss is .* at step 102") as caught:
        window.fetch()
    assert caught.value.step == 102
    assert isinstance(caught.value, UserError)
