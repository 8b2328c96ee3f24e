"""What timm and PyTorch compute, and real photos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import REPOSITORY


@pytest.fixture(scope="session")
def timm_golden() -> dict[str, Any]:
    """tests/golden/timm_training.json, made by make_timm_training.py beside it."""
    return json.loads((REPOSITORY / "tests" / "golden" / "timm_training.json").read_text())


@pytest.fixture(scope="session")
def flowers() -> Path:
    """Real photos: 5 classes, train and val."""
    folder = REPOSITORY.parent / "shared" / "data" / "photos" / "flowers5"
    if not folder.is_dir():
        pytest.skip("no shared data")
    return folder
