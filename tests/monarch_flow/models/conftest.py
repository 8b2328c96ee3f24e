"""The same random numbers in every test of the models, whichever ran before."""

from __future__ import annotations

import oneflow_accel

import pytest


@pytest.fixture(autouse=True)
def _seed() -> None:
    oneflow_accel.select_device().manual_seed(3)
