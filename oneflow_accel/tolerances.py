"""The one table of numeric tolerances: how far a result may be from a float64 reference.

By dtype, `rtol` and `atol` are multiples of what rounding explains for one operation; for a
reduction over n terms (`reduced=n`) the absolute part grows by sqrt(n), a random walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


TOLERANCES = {
    "float64": Tolerance(rtol=1e-10, atol=1e-12),
    "float32": Tolerance(rtol=2e-5, atol=2e-6),
    "float16": Tolerance(rtol=2e-3, atol=2e-3),
    "bfloat16": Tolerance(rtol=1.6e-2, atol=1.6e-2),
}


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    *,
    dtype: str = "float32",
    reduced: int = 1,
    override: Tolerance | None = None,
    reason: str | None = None,
) -> None:
    """Assert that `actual` equals the float64 `expected` within the tolerance of `dtype`.

    Args:
        reduced: number of terms each element sums up; scales the absolute tolerance.
        override: a tolerance for this one comparison, in place of the table's; needs a `reason`.
    """
    assert (override is None) == (reason is None), "a tolerance override needs a reason"
    tolerance = override or TOLERANCES[dtype]
    expected = np.asarray(expected, dtype=np.float64)
    actual = np.asarray(actual, dtype=np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    scale = float(np.sqrt(np.mean(expected**2))) if expected.size else 0.0
    atol = tolerance.atol * np.sqrt(max(reduced, 1)) * max(1.0, scale)
    np.testing.assert_allclose(actual, expected, rtol=tolerance.rtol, atol=atol)
