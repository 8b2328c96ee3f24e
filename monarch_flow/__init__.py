"""Monarch matrices (Dao et al. 2022) as layers, vision models made of them, and their training."""

# Before any part of it imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
