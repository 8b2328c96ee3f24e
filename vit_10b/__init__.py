"""A vision transformer of 10 billion parameters, cut over the processes that train it."""

# This comes before any part of vit_10b imports oneflow: oneflow_accel says why.
import oneflow_accel  # noqa: F401
