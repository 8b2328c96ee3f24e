"""What is read out of metric logs, and how it stands in the table and the picture."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from flow_train.compare import report
from flow_train.compare.report import Entry, draw_comparison, format_page
from flow_train.compare.results import data_of_tests, read_results
from flow_train.compare.rows import latex
from flow_train.compare.study import PlannedRun, Row, Study
from flow_train.metrics.curves import COLORS
from flow_train.metrics.log import RunLog
from tests.monarch_flow.comparison.logs import SPEEDS, write_log


def test_figures_of_a_run(tmp_path):
    results = read_results(write_log(tmp_path, [40, 60, 55], tested=58.5, waiting=0.25))
    assert (results.tested, results.initial, results.last) == (58.5, None, 55)
    assert (results.epochs, results.validated) == ((1, 2, 3), (40, 60, 55))
    (phase,) = results.phases
    assert (phase.parameters, phase.gmacs) == (4000, 2.0)
    # 29 steps without the first line: 2 at 20, 6 at 50, 12 at 100, 9 at 110 images/s.
    assert phase.rate == 100
    # A quarter of the steps is 7.25 of them.
    assert phase.quartiles == (50, 110)
    assert results.seconds == pytest.approx(3 * sum(10 * n / rate for n, rate in SPEEDS))
    assert results.waiting == pytest.approx(0.25)
    assert results.best_epoch == 2
    assert results.switch_epoch is None
    assert not results.best_before_switch


def test_a_switch_makes_two_phases(tmp_path):
    results = read_results(write_log(tmp_path, [40, 70, 50], switch=2))
    monarch, dense = results.phases
    assert (monarch.parameters, monarch.gmacs, monarch.rate) == (1500, 1.25, 100)
    assert (dense.parameters, dense.gmacs, dense.rate) == (4000, 2.0, 50)
    assert results.tested is None
    assert results.switch_epoch == 2
    assert results.best_before_switch
    better = read_results(write_log(tmp_path / "better", [40, 70, 80], switch=2))
    assert not better.best_before_switch
    # At once dense: nothing was trained before.
    at_once = read_results(write_log(tmp_path / "at-once", [40], switch=0))
    assert [phase.parameters for phase in at_once.phases] == [4000]


def test_initial_accuracy_is_no_epoch(tmp_path):
    results = read_results(write_log(tmp_path, [60, 50], initial=90))
    assert (results.initial, results.last, results.best_epoch) == (90, 50, 1)
    assert results.epochs == (0, 1, 2)


def test_a_log_with_next_to_nothing(tmp_path):
    log = RunLog(tmp_path)
    log.close()
    results = read_results(log.path)
    assert (results.tested, results.last, results.best_epoch) == (None, None, None)
    assert [(phase.rate, phase.quartiles) for phase in results.phases] == [(None, None)]
    with pytest.raises(OSError, match="absent"):
        read_results(tmp_path / "absent")


@pytest.fixture
def entries(tmp_path):
    """Dense, sparse to dense, projected, and one that failed."""
    logs = {
        "dense": write_log(tmp_path / "dense", [50, 81.25], tested=80.5),
        "s2d": write_log(tmp_path / "s2d", [70, 40], tested=70, switch=1, waiting=0.4),
        "projected": write_log(tmp_path / "projected", [75, 80], initial=65.125, tested=79),
    }
    found = []
    for name in (*logs, "broken"):
        row = Row(name=name, experiment="mnist/vit")
        words = ("experiment=mnist/vit", "run_dir=${work_dir}/x")
        run = PlannedRun(row, words, tmp_path / name)
        if name in logs:
            found.append(Entry(run, "done", read_results(logs[name]), "a machine, today"))
        else:
            found.append(Entry(run, "failed: exit code 2"))
    return found


def test_table(entries):
    study = Study(name="ours", title="All of them", rows=[entry.run.row for entry in entries])
    page = format_page(study, entries, "picture.png", "monarch_flow.train")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    head, rule, *body = rows
    assert head == [
        "run",
        "accuracy",
        "after the last epoch",
        "after 3 s",
        "before the first step",
        "parameters",
        "GMACs",
        "training images/s",
        "speed",
        "training time",
        "state",
    ]
    assert set(map(len, rows)) == {len(head)}
    assert set("".join(rule)) == {"-", ":"}
    dense, sparse_to_dense, projected, broken = body
    time = "0:00:03"  # 2 x (0.5 + 0.4 + 0.27 + 0.4) s
    speed = ["4,000", "2", "100 (50 to 110)", "1.00 x", time, "done"]
    assert dense == ["dense", "80.50 %", "81.25 %", "81.25 %", "-", *speed]
    # Its second epoch took twice as long.
    assert sparse_to_dense[3] == "55.00 %"
    assert sparse_to_dense[5:9] == [
        "1,500, then 4,000",
        "1.25, then 2",
        "100 (100 to 110), then 50 (50 to 55)",
        "1.00 x, then 0.50 x",
    ]
    assert projected[:5] == ["projected", "79.00 %", "80.00 %", "80.00 %", "65.12 %"]
    assert broken == ["broken", *["-"] * 9, "failed: exit code 2"]
    assert page.startswith("# All of them\n")
    assert "![All of them](picture.png)" in page
    assert "best epoch of s2d was before its layers became dense" in page
    assert "waiting for images: s2d 40 %" in page
    # Within a tenth are those of s2d: 100 to 110 and 50 to 55.
    assert "at these images/s: dense 50 to 110, projected 50 to 110.\n" in page
    assert "Measured on a machine, today." in page
    # It can be pasted into a shell.
    assert (
        "- dense: `python -m monarch_flow.train experiment=mnist/vit 'run_dir=${work_dir}/x'`"
        in page
    )


def _assert_numbers_inside(figure, panels):
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    headings = [axes.title.get_window_extent(renderer) for axes in figure.axes[:5]]
    for left, right in itertools.pairwise(headings):
        assert left.x1 < right.x0
    for axes in panels:
        for text in axes.texts:
            place, frame = text.get_window_extent(renderer), axes.get_window_extent(renderer)
            assert frame.x0 <= place.x0, text.get_text()
            assert place.x1 <= frame.x1 + 1, text.get_text()


@pytest.mark.parametrize("gmacs", [1.0, 0.003, 3e-6])
def test_small_models_have_figures_that_can_be_read(tmp_path, gmacs):
    """10^6 MACs where 10^9 would be 0.007669, in the table and in the picture."""
    log = write_log(tmp_path / "a", [50], tested=50, on_validation=True, gmacs=gmacs)
    row = Row(name="a", experiment="mnist/vit")
    run = PlannedRun(row, ("experiment=mnist/vit",), tmp_path)
    results = read_results(log)
    study = Study(name="ours", title="One", rows=[row])
    page = format_page(study, [Entry(run, "done", results, "here")], None, "monarch_flow.train")
    head, _, cells = (line.split(" | ") for line in page.splitlines() if line.startswith("|"))
    unit = "GMACs" if gmacs == 1 else "10^6 MACs"
    number = {1.0: "2", 0.003: "6", 3e-6: "0.006"}[gmacs]
    assert cells[head.index(unit)] == number
    # What the accuracy is on is said, and what that means.
    assert "Accuracy is top-1 on the validation images, with" in page
    assert "The data has no test images of its own." in page
    assert data_of_tests([results]) == "the validation images"
    other = read_results(write_log(tmp_path / "b", [50], tested=50, on_validation=False))
    assert data_of_tests([other]) == "the test images"


def test_picture(entries, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    saved = []
    save = report.save_figure
    monkeypatch.setattr(
        report, "save_figure", lambda figure, path: (saved.append(figure), save(figure, path))[1]
    )
    runs = {entry.name: [entry.results] for entry in entries if entry.results}
    output = draw_comparison(runs, "All of them", tmp_path / "picture.png")
    curves, accuracy, parameters, macs, speed, by_time, by_size = saved[0].axes
    lines = {line.get_label(): line for line in curves.get_lines()}
    assert lines["projected"].get_xdata().tolist() == [0, 1, 2]
    assert lines["projected"].get_ydata().tolist() == [65.125, 75, 80]
    assert [lines[name].get_color() for name in runs] == list(COLORS[:3])
    assert len(lines) == 4, "and the line of the switch"
    (legend,) = saved[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "layers become dense",
        "before the first step",
        "after layers became dense",
        "half of the steps",
    ]
    assert accuracy.get_xlabel() == "on test or validation images"
    assert parameters.get_title() == "Trained parameters, thousands"
    # The middle half of the steps, drawn along each bar; the number stands behind both.
    ranges = [tuple(line.get_xdata()) for line in speed.get_lines()]
    assert ranges == [(50, 110), (100, 110), (50, 55), (50, 110)]
    _assert_numbers_inside(saved[0], (accuracy, parameters, macs, speed))
    assert [line.get_xydata().tolist() for line in by_size.get_lines()] == [
        [[4, 80.5]],
        [[4, 70]],
        [[4, 79]],
    ]
    assert [line.get_xdata()[0] for line in by_time.get_lines()] == [
        results.seconds for (results,) in runs.values()
    ]
    assert [text.get_text() for text in accuracy.get_yticklabels()] == list(runs)
    assert [bar.get_width() for bar in accuracy.patches] == [80.5, 70, 79]
    assert [line.get_xdata()[0] for line in accuracy.get_lines()] == [65.125]
    assert [bar.get_width() for bar in parameters.patches] == [4, 1.5, 4, 4]
    assert [bar.get_width() for bar in macs.patches] == [2, 1.25, 2, 2]
    assert [bar.get_width() for bar in speed.patches] == [100, 100, 50, 100]
    assert [to_hex(bar.get_facecolor()) for bar in speed.patches] == [
        COLORS[number] for number in (0, 1, 1, 2)
    ]
    # From top to bottom as in the table, the bar of afterwards below the one of before.
    assert accuracy.yaxis_inverted()
    _, before, after, _ = (bar.get_y() for bar in speed.patches)
    assert before < after
    with Image.open(output) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
    assert output.stat().st_size < 150_000


def test_rows_of_several_seeds(tmp_path):
    """Mean and standard deviation (here of NumPy) in Markdown, LaTeX and the picture; each run in
    comparison.csv's rows; a seed that failed is said."""
    tested = {"dense": [80.0, 81.5, 82.25], "small_one": [70.0, 71.0]}
    entries = []
    for name, accuracies in tested.items():
        row = Row(name=name, experiment="mnist/vit")
        for seed, accuracy in enumerate(accuracies):
            run = PlannedRun(row, (), Path("x"), seed=seed)
            log = write_log(tmp_path / run.name, [50 + seed, accuracy], tested=accuracy)
            entries.append(Entry(run, "done", read_results(log), "here"))
    failed = PlannedRun(row, (), Path("x"), seed=2)
    entries.append(Entry(failed, "failed: exit code 2"))
    said = {
        name: f"{np.mean(accuracies):.2f} ± {np.std(accuracies, ddof=1):.2f} %"
        for name, accuracies in tested.items()
    }
    heads, dense, small = rows = report.table(entries)
    assert (dense[:2], dense[-1]) == (["dense", said["dense"]], "done")
    assert (small[:2], small[-1]) == (
        ["small_one", said["small_one"]],
        "2 of 3 seeds; failed: exit code 2",
    )
    assert (
        latex(rows)
        .splitlines()[4]
        .startswith("  dense & " + said["dense"].replace("%", r"\%").replace("±", r"$\pm$") + " & ")
    )
    assert r"  small\_one & " in latex(rows)
    assert latex(rows).startswith(
        "\\begin{tabular}{l" + "r" * (len(heads) - 1) + "}\n  \\toprule\n"
    )
    assert [line[:3] for line in report.figures(entries)] == [
        ["run", "seed", "accuracy"],
        *(
            [name, str(seed), str(accuracy)]
            for name, accuracies in tested.items()
            for seed, accuracy in enumerate(accuracies)
        ),
    ]
    study = Study(name="ours", title="Seeds", rows=[entries[0].run.row, row])
    page = format_page(study, entries, None, "monarch_flow.train")
    assert "Rows have several seeds" in page
    assert "- small_one-seed2: `" in page
    groups = {name: report.done(group) for name, group in report.by_row(entries).items()}
    assert draw_comparison(groups, "Seeds", tmp_path / "seeds.png").stat().st_size > 10_000
