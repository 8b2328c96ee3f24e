"""Whole runs of main.py: what they leave on disk, and that every way to run gives the same."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

from oneflow_accel import current_backend
from oneflow_accel.kernels import plugin

import numpy as np
import pytest
from oneflow import nn

from flow_train.metrics.log import read_metrics
from flow_train.metrics.peak import Peak
from resnet50_imagenet import inference
from tests.modes import only_all
from tests.resnet50_imagenet.conftest import CLASSES, SMALL, VAL_PER_CLASS, losses

needs_plugin = pytest.mark.skipif(
    not plugin.state().loaded, reason="NHWC on a CPU needs the plug-in, which is not built"
)


def test_run_leaves_metrics_curves_tensorboard_and_checkpoints(shapes, run_main, tmp_path):
    out = tmp_path / "out"
    asked = {"FLOW_TRAIN_CURVES": "on", "FLOW_TRAIN_PEAK": ""}
    result = run_main(shapes, *SMALL, "--epochs", "2", "--output-dir", out, env=asked)
    line = (
        r"Epoch: \[1\]\[12/12\]\tTime .*\tData .*\tLoss .*\tAcc@1 .*\tAcc@5 .*\tThroughput .*\tETA"
    )
    assert re.search(line, result.stdout), result.stdout
    assert sorted(losses(out)) == list(range(1, 25))
    assert sorted(losses(out, "val")) == [12, 24]
    assert re.search(r"^MFU: .* GFLOP .* TFLOP/s \(measured, ", result.stdout, re.MULTILINE)
    for line in read_metrics(out / "metrics.jsonl"):
        values = line["values"]
        assert line["split"] == "val" or values["grad_norm"] > 0 < values["mfu"] < 150
        assert line["split"] == "val" or 0.02 < values["peak_memory_gb"] < 8
    assert (out / "curves.png").stat().st_size > 10_000
    assert list((out / "tensorboard").glob("events.*"))
    checkpoints = out / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == "step-00000024"
    assert (checkpoints / (checkpoints / "best").read_text().strip()).is_dir()


def test_it_learns(shapes, run_main, tmp_path):
    """Disks, squares and stripes are easy; a wrong gradient or label would not get there."""
    out = tmp_path / "out"
    crop = ("-a", "resnet18", "--scale", "0.7", "1", "--lr", "0.003", "--epochs", "6")
    result = run_main(shapes, *SMALL, *crop, "--output-dir", out)
    best = float(re.search(r"best Acc@1 ([\d.]+)", result.stdout).group(1))
    assert best >= 90, result.stdout


# At a larger rate one activation near 0 that rounding puts on the other side of a ReLU changes the
# last of 20 losses by more than 1e-4: seen at 1e-3, between NCHW and NHWC.
TWENTY_STEPS = ("--freeze-bn", "--lr", "0.0003", "--max-steps", "20")


@pytest.fixture(scope="module")
def twenty_steps(shapes, run_main, tmp_path_factory) -> dict[int, float]:
    """Losses of one process, eagerly, in NCHW, BatchNorm frozen: what the others must equal."""
    out = tmp_path_factory.mktemp("reference")
    run_main(shapes, *SMALL, *TWENTY_STEPS, "--output-dir", out)
    return losses(out)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, ("--graph",), id="graph"),
        pytest.param(1, ("--channels-last",), id="nhwc", marks=needs_plugin),
        pytest.param(1, ("--channels-last", "--graph"), id="nhwc-graph", marks=needs_plugin),
        pytest.param(2, (), id="2-processes"),
        pytest.param(4, (), id="4-processes"),
        pytest.param(2, ("--graph",), id="2-processes-graph", marks=only_all),
        pytest.param(
            2, ("--channels-last",), id="2-processes-nhwc", marks=[needs_plugin, only_all]
        ),
        pytest.param(1, ("-j", "2"), id="2-workers"),
    ],
)
def test_first_20_losses_equal_one_eager_process(
    shapes, run_main, tmp_path, twenty_steps, processes, options
):
    out = tmp_path / "out"
    args = (*SMALL, *TWENTY_STEPS, "--output-dir", out, *options)
    run_main(shapes, *args, processes=processes)
    ours = losses(out)
    assert sorted(ours) == list(range(1, 21))
    # A graph does not show its gradients.
    line = read_metrics(out / "metrics.jsonl")[0]
    assert ("grad_norm" in line["values"]) == ("--graph" not in options)
    # The bar that the layouts are held to: 1e-4 relative, on the same global batch and seed.
    np.testing.assert_allclose(
        [ours[step] for step in sorted(ours)],
        [twenty_steps[step] for step in sorted(twenty_steps)],
        rtol=1e-4,
    )


@pytest.fixture(scope="module")
def trained(shapes, run_main, tmp_path_factory) -> Path:
    """Checkpoints of a run of eight steps."""
    out = tmp_path_factory.mktemp("trained")
    run_main(shapes, *SMALL, "--max-steps", "8", "--output-dir", out)
    return out / "checkpoints"


@pytest.fixture(scope="module")
def evaluated(shapes, run_main, trained) -> str:
    """What one process prints of them."""
    return run_main(shapes, *SMALL, "-e", "--resume", trained).stdout


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_covers_every_image_once(
    shapes, run_main, trained, evaluated, tmp_path, processes
):
    """21 images do not divide by 2 or 4 processes, nor by the batch."""
    table = tmp_path / "new" / "table.csv"
    options = ("-e", "--resume", trained, "--predictions", table)
    result = run_main(shapes, *SMALL, *options, processes=processes, fresh=True)
    found = re.search(
        r"Acc@1 ([\d.]+) Acc@5 ([\d.]+) Loss ([\d.]+) \((\d+) images\)", result.stdout
    )
    assert found, result.stdout
    assert int(found.group(4)) == len(CLASSES) * VAL_PER_CLASS
    # All classes are among the best five of three.
    assert float(found.group(2)) == 100
    assert re.search(r"Acc@1 ([\d.]+)", evaluated).group(1) == found.group(1)
    rows = list(csv.DictReader(table.open()))
    assert [row["image"] for row in rows] == sorted(map(str, (shapes / "val").glob("*/*.png")))
    right = sum(row["class1"] == row["label"] == Path(row["image"]).parent.name for row in rows)
    assert 100 * right / len(rows) == pytest.approx(float(found.group(1)), abs=1e-3)
    for row in rows:
        assert sorted(row[f"class{n}"] for n in (1, 2, 3)) == sorted(CLASSES)
        shares = [float(row[f"probability{n}"]) for n in (1, 2, 3)]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("options", [("--no-fold",), ("--graph",), ("--bf16",)])
def test_evaluation_is_the_same_however_it_runs(shapes, run_main, trained, evaluated, options):
    other = run_main(shapes, *SMALL, "-e", "--resume", trained, *options).stdout
    results = [re.search(r"Acc@1 ([\d.]+) .* Loss ([\d.]+)", text) for text in (evaluated, other)]
    assert all(results)
    (accuracy, loss), (other_accuracy, other_loss) = (found.groups() for found in results)
    assert float(other_loss) == pytest.approx(
        float(loss), rel=2e-2 if "--bf16" in options else 1e-3
    )
    # One of 21 images may sit on the border between two classes in bfloat16.
    most = 100 / 21 + 0.01 if "--bf16" in options else 0
    assert abs(float(other_accuracy) - float(accuracy)) <= most


def test_benchmark_prints_rate_and_share_of_peak(run_main):
    args = ("-a", "resnet18", "--image-size", "64", "-b", "2", "--benchmark")
    rate = r"([\d.]+) img/s, ([\d.]+) TFLOP/s, ([\d.]+) % of ([\d.]+) TFLOP/s \((.*)\)"
    output = run_main(*args, "--precision", "float32", env={"FLOW_TRAIN_PEAK": ""}).stdout
    *figures, source = re.search(rate, output).groups()
    images, speed, share, peak = map(float, figures)
    assert images > 0
    assert source in ("measured, oneflow.matmul", "measured, numpy.matmul")
    assert share == pytest.approx(100 * speed / peak, abs=10)
    assert 0 < share < 100


def test_benchmark_of_all_layouts_and_precisions(run_main):
    output = run_main(
        "-a", "resnet18", "--image-size", "64", "-b", "2", "--benchmark", "all"
    ).stdout
    rows = re.findall(r"^(N\w+) (\w+) +[\d.]+ img/s, [\d.]+ TFLOP/s, [\d.]+ % of ", output, re.M)
    backend = current_backend()
    layouts = ["NCHW", "NHWC"] if backend.supports("nhwc") else ["NCHW"]
    precisions = ["float32", "bfloat16"] if backend.supports("bfloat16_inference") else ["float32"]
    assert rows == [(layout, name) for layout in layouts for name in precisions]


def test_the_peak_is_that_of_the_precision(monkeypatch):
    monkeypatch.setattr(inference, "peak_of", lambda backend, dtype: Peak(1e12, dtype))
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval().to(current_backend().device())
    images = np.zeros((2, 3, 8, 8), dtype=np.float32)
    line = inference.measure_forward(model, images, current_backend(), "bfloat16")
    assert line.endswith("% of 1.000 TFLOP/s (bfloat16)")


def test_dummy_data_needs_no_folder(run_main, tmp_path):
    out = tmp_path / "out"
    run_main("nowhere", "--dummy", *SMALL, "--max-steps", "2", "--output-dir", out)
    state = json.loads((out / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["content"]["state"]["num_classes"] == 1000


def test_multiprocessing_distributed_alone_runs_on_this_nodes_devices(shapes, run_main, tmp_path):
    """One CPU device on this node: one process, no launcher."""
    out = tmp_path / "out"
    args = (*SMALL, "--max-steps", "1", "--multiprocessing-distributed", "--output-dir", out)
    run_main(shapes, *args, fresh=True)
    assert list(losses(out)) == [1]


def test_undecodable_file_is_named_and_skipped(shapes, run_main, tmp_path):
    """One bad file of 101 or more is below 1 %; it is named once and training goes on."""
    data = tmp_path / "data"
    for split, count in (("train", 40), ("val", 34)):
        for kind in CLASSES:
            folder = data / split / kind
            folder.mkdir(parents=True)
            for index in range(count):
                source = shapes / "train" / kind / f"{index % 32:03d}.png"
                (folder / f"{index:03d}.png").write_bytes(source.read_bytes())
    bad = Path("square") / "003.png"
    for split in ("train", "val"):
        (data / split / bad).write_bytes((data / split / bad).read_bytes()[:100])
    result = run_main(data, *SMALL, "--epochs", "1", "--output-dir", tmp_path / "out")
    assert result.stdout.count(str(data / "train" / bad)) == 1
    assert result.stdout.count(str(data / "val" / bad)) == 1
    assert "(101 images)" in result.stdout
