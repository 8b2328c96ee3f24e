"""The tolerances of oneflow_accel.tolerances, which `conformance` compares by too."""

from oneflow_accel.tolerances import TOLERANCES, Tolerance, assert_close

__all__ = ["TOLERANCES", "Tolerance", "assert_close"]
