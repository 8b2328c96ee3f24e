"""The order of these tests: values first, so that a breakage shows soon, and what starts processes
last."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
WITH_PROCESSES = ("collectives", "fallbacks", "kernel_failures", "memory", "plugin")
WITH_PROCESSES += ("small_operations",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.parent == FOLDER]
    ordered = sorted((items[place] for place in places), key=_turn)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _turn(item: pytest.Item) -> int:
    stem = item.path.stem.removeprefix("test_")
    if stem == "records" and item.name.startswith("test_eager["):
        return 0
    return 2 if stem in WITH_PROCESSES else 1
