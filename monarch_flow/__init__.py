"""Monarch matrices (Dao et al. 2022) as layers, vision models made of them, and their training."""

# This must come before any part imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
