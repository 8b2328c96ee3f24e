"""Imports the device layer before any test imports oneflow: it patches oneflow's import."""

import oneflow_accel  # noqa: F401
