"""The picture of the curves: what is on it, and that it is drawn without a display."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from PIL import Image

from flow_train.metrics import curves
from flow_train.metrics.curves import draw_curves, draw_metrics
from flow_train.metrics.log import RunLog


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    """The figures that were saved, for a look at their axes."""
    monkeypatch.setenv("FLOW_TRAIN_CURVES", "on")
    monkeypatch.delenv("DISPLAY", raising=False)
    saved = []
    save = curves.save_figure
    monkeypatch.setattr(
        curves, "save_figure", lambda figure, path: (saved.append(figure), save(figure, path))[1]
    )
    return saved


def log_run(tmp_path, *, val: bool) -> RunLog:
    log = RunLog(tmp_path / "run")
    rng = np.random.default_rng(0)
    for step in range(1, 201):
        loss = 2 * math.exp(-step / 80) * rng.uniform(0.7, 1.3)
        log.log(step, {"loss": loss, "acc1": 100 - 40 * loss, "lr": 0.1, "time": 1.0})
        if val and step % 50 == 0:
            log.log(step, {"loss": 1.1 * loss, "acc1": 95 - 40 * loss}, split="val")
    log.close()
    return log


def test_panels_and_lines(tmp_path, figures):
    log = log_run(tmp_path, val=True)
    output = tmp_path / "curves.png"
    output.write_bytes(b"old")
    assert draw_curves(log.path, output) == output
    loss, accuracy, rate = figures[0].axes
    titles = [axes.get_title() for axes in (loss, accuracy, rate)]
    assert titles == ["Loss", "Accuracy", "Learning rate"]
    assert all(axes.get_xlabel() == "step" for axes in (loss, accuracy, rate))
    raw, smooth, val = loss.get_lines()
    assert [line.get_label() for line in (smooth, val)] == ["train", "validation"]
    assert len(raw.get_xdata()) == len(smooth.get_xdata()) == 200
    assert np.abs(np.diff(smooth.get_ydata())).mean() < np.abs(np.diff(raw.get_ydata())).mean() / 3
    assert val.get_xdata().tolist() == [50, 100, 150, 200]
    assert smooth.get_color() != val.get_color()
    with Image.open(output) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20


def test_training_only_and_values_that_are_not_finite(tmp_path, figures):
    draw_curves(log_run(tmp_path, val=False).path, tmp_path / "curves.png")
    assert [len(axes.get_lines()) for axes in figures[0].axes] == [2, 2, 1]
    log = RunLog(tmp_path)
    log.log(1, {"loss": 2.0})
    log.log(2, {"loss": math.nan})
    log.close()
    draw_curves(log.path, tmp_path / "curves.png")
    (axes,) = figures[1].axes
    assert axes.get_lines()[0].get_ydata().tolist() == [2.0]


def test_nothing_to_draw_is_a_clear_error(tmp_path, monkeypatch):
    output = tmp_path / "curves.png"
    with pytest.raises(UserError, match="no metric log"):
        draw_curves(tmp_path / "absent.jsonl", output)
    log = RunLog(tmp_path)
    log.log(1, {"throughput": 3.0})
    log.close()
    with pytest.raises(UserError, match="holds no loss"):
        draw_curves(log.path, output)
    # Nothing is drawn where the environment says so.
    monkeypatch.setenv("FLOW_TRAIN_CURVES", "off")
    assert draw_curves(log_run(tmp_path, val=True).path, output) is None
    assert not output.exists()


@pytest.mark.parametrize(("first", "last"), [(400, 370), (60000, 50), (1.2, 1.1)])
def test_perplexity_has_several_numbers_however_far_it_falls(tmp_path, figures, first, last):
    values = np.geomspace(first, last, 5)
    lines = [
        {"step": step, "split": "train", "values": {"perplexity": float(value)}}
        for step, value in enumerate(values, start=1)
    ]
    draw_metrics(lines, tmp_path / "curves.png", source=tmp_path / "metrics.json")
    axes = figures[0].axes[0]
    low, high = axes.get_ylim()
    labels = [
        label.get_text()
        for label, place in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
        if low <= place <= high
    ]
    assert 3 <= len(set(labels)) == len(labels) <= 14
    assert all(float(label) > 0 for label in labels)
