"""Channels last (NHWC) on oneflow 0.9.0, and checkpoints that do not depend on the layout."""

from oneflow_accel.layouts.convert import (
    is_channels_last,
    layout_array,
    load_standard_state_dict,
    standard_array,
    standard_state_dict,
    to_channels_first,
    to_channels_last,
)

__all__ = [
    "is_channels_last",
    "layout_array",
    "load_standard_state_dict",
    "standard_array",
    "standard_state_dict",
    "to_channels_first",
    "to_channels_last",
]
