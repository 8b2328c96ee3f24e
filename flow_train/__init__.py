"""Training, which knows no model: loop, steps, hooks, checkpoints, data, optimizers, metrics."""

# Before any part of it imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
