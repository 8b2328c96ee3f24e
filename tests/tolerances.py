"""The one table of numeric tolerances: how far a result may be from its reference, by dtype.

A result in a given dtype is compared with a reference computed at float64. `rtol` and `atol` are
multiples of what rounding in that dtype explains for one operation; a reduction over n terms
multiplies the absolute part by sqrt(n) (errors of rounding add up like a random walk), which the
caller passes as `reduced=n`.
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
    """Assert that `actual` equals `expected` within the tolerance of `dtype`.

    Args:
        actual: what the code under test computed.
        expected: the reference, same shape, float64.
        dtype: the dtype that `actual` was computed in; a key of TOLERANCES.
        reduced: number of terms each element sums up; scales the absolute tolerance.
        override: a tolerance for this one comparison, in place of the table's.
        reason: why the override is needed; required with it.
    """
    assert (override is None) == (reason is None), "a tolerance override needs a reason"
    tolerance = override or TOLERANCES[dtype]
    expected = np.asarray(expected, dtype=np.float64)
    actual = np.asarray(actual, dtype=np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    scale = float(np.sqrt(np.mean(expected**2))) if expected.size else 0.0
    atol = tolerance.atol * np.sqrt(max(reduced, 1)) * max(1.0, scale)
    np.testing.assert_allclose(actual, expected, rtol=tolerance.rtol, atol=atol)
