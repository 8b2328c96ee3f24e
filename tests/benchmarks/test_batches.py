"""The sweep over batch sizes: points from rows, the table, the picture."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from benchmarks import batches
from benchmarks.items import BATCHES, all_items
from benchmarks.results import Row


def row(item: str, ours: str, peer: str) -> Row:
    return Row("2026-11-22", "CPU", "a 1, b 2", BATCHES, item, ours, peer, "1", "", "", "", "", "")


ROWS = [
    row("dense vit-s train, batch 1", "30", "40"),
    row("Monarch vit-s train, batch 1", "40", "80"),
    row("dense vit-s train, batch 16", "300", ""),
    row("Monarch vit-s train, batch 16", "150", "200"),
    row("dense layer, batch 16", "3", "3"),
]


def test_points_are_dense_over_monarch() -> None:
    points = batches.points(ROWS)
    assert points == [
        batches.Point("vit-s train", 1, 0.75, 0.5),
        batches.Point("vit-s train", 16, 2.0, None),
    ]
    assert batches.table(points).splitlines() == [
        "| Monarch over dense, ours (PyTorch) | 1 | 16 |",
        "| --- | --- | --- |",
        "| vit-s train | 0.75 (0.50) | 2.00 |",
    ]


def test_every_item_of_the_sweep_becomes_half_a_point() -> None:
    names = [item.name for item in all_items() if item.group == BATCHES]
    assert 2 * len(batches.points([row(name, "1", "1") for name in names])) == len(names) > 0


def test_the_picture(tmp_path: Path) -> None:
    batches.draw(batches.points(ROWS), "title", tmp_path / "batches.png")
    with Image.open(tmp_path / "batches.png") as image:
        assert image.width > 500
