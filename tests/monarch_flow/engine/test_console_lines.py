"""What a run says on the console: a line per log step, and one where it was silent for long."""

from __future__ import annotations

import re
from types import SimpleNamespace

from oneflow import nn

from flow_train.metrics import console
from flow_train.metrics.console import EpochLines, Progress
from flow_train.options import Position, TrainerOptions
from monarch_flow.engine.sparse_to_dense import SparseToDense
from monarch_flow.layers import MonarchLinear


def test_a_checkpoint_takes_no_line_away(run_tiny, tmp_path, capsys, monkeypatch):
    """It looks at the losses as a log line does. A long validation says how far it is."""
    monkeypatch.setattr(console, "LONGEST_SILENCE_S", -1.0)
    each = ("callbacks.model_checkpoint.every_n_train_steps=2", "trainer.limit_train_batches=4")
    run_tiny(tmp_path, *each, "trainer.max_epochs=1", "test_after_training=false")
    out = capsys.readouterr().out
    lines = re.findall(r"^Epoch: \[0\]\[(\d)/4\]\t.*Throughput.*\tETA 0:00:0\d$", out, re.MULTILINE)
    assert lines == ["1", "2", "3", "4"]
    batches = re.findall(r"^validation: \[(\d)/(\d)\]\tLoss .* images/s\tETA", out, re.MULTILINE)
    assert [number for number, _ in batches] == [str(n + 1) for n in range(int(batches[0][1]))]
    assert out.count("Epoch: [0] * Acc@1 ") == 1


def test_silence_is_broken(monkeypatch, capsys):
    """10 steps of two batches and 6 s each; 5 more are to come after the epoch."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    bar, position = Progress(20, "batch"), Position(3, 0, 100)
    lines = EpochLines(bar, position, 115, TrainerOptions(accumulate=2))
    for _ in range(10):
        now[0] += 6
        position.batch += 2
        position.step += 1
        bar.update(2)
        lines.break_silence()
    assert capsys.readouterr().out.splitlines() == [
        "Epoch: [3][ 8/20]\t6.0 s per step\tETA 0:01:06",
        "Epoch: [3][16/20]\t6.0 s per step\tETA 0:00:42",
    ]


def test_when_layers_become_dense_is_said_first():
    calendar = SimpleNamespace(total_epochs=lambda: 4, epochs=4)
    trainer = SimpleNamespace(model=nn.Sequential(MonarchLinear(4, 4)), calendar=calendar)
    assert SparseToDense(0.5).outlook(trainer) == "dense from epoch 2 on"
    never = SparseToDense(1.0).outlook(trainer)
    assert never.startswith("in 4 epochs they never become dense: give more ")
    trainer.model = nn.Sequential(nn.Linear(4, 4))
    assert SparseToDense(0.5).outlook(trainer) == ""
