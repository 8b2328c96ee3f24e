"""Import before libai, which then gets only the patches before LIBAI_PATCHES_BEFORE=NNNN."""

from __future__ import annotations

import os
from pathlib import Path

import oneflow_accel  # noqa: F401
from oneflow_accel.patching import package, series

VARIABLE = "LIBAI_PATCHES_BEFORE"


def _load_series(root: Path, name: str, version: str) -> list[series.Patch]:
    patches = series.load_series(root, name, version)
    end = os.environ.get(VARIABLE)
    if name == "libai" and end:
        patches = [patch for patch in patches if patch.name < end]
    return patches


package.load_series = _load_series
