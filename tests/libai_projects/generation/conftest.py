"""The tiny model of the golden files, and transformers' results with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.libai_projects.generation import tiny_gpt2
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def model() -> NumpyGPT2:
    return NumpyGPT2(tiny_gpt2.weights(), tiny_gpt2.HEADS)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "transformers.json").read_text())
