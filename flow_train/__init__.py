"""Training, which knows no model: loop, steps, hooks, checkpoints, data, optimizers, metrics."""

# This comes before any part of flow_train imports oneflow: oneflow_accel says why.
import oneflow_accel  # noqa: F401
