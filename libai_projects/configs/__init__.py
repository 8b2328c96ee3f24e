"""Configs that projects share, and the way to load one."""

from __future__ import annotations

from pathlib import Path

# Before libai, which imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401

from libai.config import LazyConfig
from omegaconf import DictConfig


def get_config(path: str) -> DictConfig:
    """Load a config such as "common/train.py" anew: an import would share one object."""
    return LazyConfig.load(str(Path(__file__).parent / path))
