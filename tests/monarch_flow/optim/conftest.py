"""What timm and PyTorch compute, for the tests of training."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launch import REPOSITORY


@pytest.fixture(scope="session")
def timm_golden() -> dict[str, Any]:
    """tests/golden/timm_training.json, made by make_timm_training.py beside it."""
    return json.loads((REPOSITORY / "tests" / "golden" / "timm_training.json").read_text())
