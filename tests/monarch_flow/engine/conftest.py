"""Digits for the engine's tests, and runs on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_flow.engine.run import run
from tests.monarch_flow.engine.engine_runs import config, draw_digits

RunTiny = Callable[..., dict[str, float]]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture
def run_tiny(digits: Path) -> RunTiny:
    def run_it(run_dir: Path, *overrides: str, **groups: Any) -> dict[str, float]:
        return run(config(digits, run_dir, *overrides, **groups))

    return run_it
