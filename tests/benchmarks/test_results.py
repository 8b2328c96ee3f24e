"""Files of results, and what counts as a regression."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from PIL import Image

from benchmarks import chart, results
from benchmarks.items import LLAMA_CPP, all_items, chosen_items
from benchmarks.results import Row


def row(item: str, ratio: str, bar: str = "") -> Row:
    where = ("2026-11-20", "CPU, 2 threads", "a 1, b 2", "gemm")
    return Row(*where, item, "1", "1", ratio, bar, *[""] * 4)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [row("conv, 3x3", "0.981", "0.95"), row("relu", "")]
    results.write(tmp_path / "2026-11-20.csv", rows)
    assert results.read(tmp_path / "2026-11-20.csv") == rows


def test_ten_percent_less_is_a_regression() -> None:
    for now, slower in (("0.91", False), ("0.89", True), ("", True)):
        found = results.regressions([row("relu", now)], [row("relu", "1.0")])
        assert [(new.ratio, old.ratio) for new, old in found] == ([(now, "1.0")] if slower else [])
    # Rows without a figure before cannot become slower.
    assert not results.regressions([row("new", "0.1"), row("relu", "")], [row("relu", "")])


def test_below_its_bar() -> None:
    cases = {
        ("0.94", "0.95"): True,
        ("0.95", "0.95"): False,
        ("", "0.95"): True,
        ("0.1", ""): False,
    }
    assert {case: row("x", *case).below_bar for case in cases} == cases


def test_rows_measured_again_take_the_place_of_the_old_ones() -> None:
    old = [row("relu", "1.0"), row("add", "0.9")]
    new = [row("add", "1.1"), row("gelu", "1.2")]
    assert results.replaced(old, new) == [row("relu", "1.0"), *new]


def test_origin_names_every_machine_and_the_time_between() -> None:
    old = dataclasses.replace(row("relu", "1.0"), date="2026-11-20", machine="A", versions="x 1")
    new = dataclasses.replace(old, date="2026-11-22", machine="B")
    assert results.origin([new]) == "B; x 1; 2026-11-22"
    assert results.origin([new, old, old]) == "B, A; x 1; 2026-11-20 to 2026-11-22"


def test_the_chart_is_drawn_from_rows_with_and_without_figures(tmp_path: Path) -> None:
    many = [row(f"conv {i}", f"{0.9 + i / 100}") for i in range(chart.MOST_BARS + 1)]
    few = dataclasses.replace(row("relu", "1.2"), group="memory", stock_ratio="0.3")
    items = [item for both in chart.MODELS.values() for item in both]
    model = row(items[0], "1.3")
    models = [model, dataclasses.replace(model, item="GPT-2 train 2x256", stock_ratio="0.2")]
    chart.draw([*many, few, row("none", ""), *models], tmp_path)
    assert Image.open(tmp_path / "latest.png").size[0] > 500
    assert Image.open(tmp_path / "models.png").size[0] > 1000
    assert set(items) <= {item.name for item in all_items()}


def test_an_item_is_measured_with_the_one_it_is_divided_by() -> None:
    names = [item.name for item in all_items()]
    assert len(set(names)) == len(names)
    for i, item in enumerate(all_items()):
        # Measured before the item that is divided by it.
        assert item.against is None or item.against in names[:i]
    names = [item.name for item in chosen_items(["resnet50"], "inference b8 bf16 over")]
    assert names == ["ResNet50 inference b8", "ResNet50 inference b8 bf16 over float32"]
    # llama.cpp is compiled only for who asks for its rows.
    asked = chosen_items([LLAMA_CPP], None)
    assert chosen_items(None, None) == [item for item in all_items() if item not in asked]
    assert asked
    assert {item.peers for item in asked} == {(LLAMA_CPP,)}
    assert chosen_items(["gemm"], "no such thing") == []
