"""Models on LiBai's parallel layers, each written once for training and for generation."""

# Before any part of it imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
