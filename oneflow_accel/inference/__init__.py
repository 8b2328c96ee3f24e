"""Models for inference: folded, and in bfloat16 where the device has it."""

from oneflow_accel.inference.bfloat16 import bfloat16_container
from oneflow_accel.inference.prepare import prepare
from oneflow_accel.inference.rules import map_layer

__all__ = ["bfloat16_container", "map_layer", "prepare"]
