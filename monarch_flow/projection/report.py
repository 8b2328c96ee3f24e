"""Reports in a table what a conversion did to each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    `name` is "" for a layer outside a model, `kind` is such as "monarch(4)", `numbers` counts the
    structured weights without the bias. `error` and `norm` are Frobenius norms of the difference
    and of the weight before.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    numbers: int
    error: float
    norm: float

    @property
    def relative_error(self) -> float:
        """error / norm; 0 where nothing is lost."""
        return self.error / self.norm if self.error else 0.0


def compare(
    name: str, kind: str, before: np.ndarray, after: np.ndarray, numbers: int
) -> LayerReport:
    """Compare a layer's dense weight (m, n) `before` and `after` in float64."""
    wide = before.astype(np.float64)
    error, norm = float(np.linalg.norm(wide - after)), float(np.linalg.norm(wide))
    return LayerReport(name, kind, before.shape[0], before.shape[1], numbers, error, norm)


def total_relative_error(reports: Sequence[LayerReport]) -> float:
    """The relative error of all weights together, as if they were one vector."""
    error = math.hypot(*(report.error for report in reports))
    return error / math.hypot(*(report.norm for report in reports)) if error else 0.0


def format_table(reports: Sequence[LayerReport]) -> str:
    rows = [("layer", "dense shape", "kind", "dense", "structured", "relative error")]
    for report in reports:
        size = report.out_features, report.in_features
        rows.append(
            (
                report.name,
                f"({size[0]}, {size[1]})",
                report.kind,
                f"{math.prod(size):,}",
                f"{report.numbers:,}",
                f"{report.relative_error:.3e}",
            )
        )
    dense = sum(report.out_features * report.in_features for report in reports)
    structured = sum(report.numbers for report in reports)
    rows.append(
        (
            f"{len(reports)} layers",
            "",
            "",
            f"{dense:,}",
            f"{structured:,}",
            f"{total_relative_error(reports):.3e}",
        )
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)
