"""Monarch and block-diagonal layers on OneFlow's global tensors, blocks split over processes.

from monarch_flow.parallel import ParallelMonarchLinear
"""

from monarch_flow.parallel.linear import (
    SPLIT,
    WHOLE,
    ParallelBlockdiagLinear,
    ParallelMonarchLinear,
)
from monarch_flow.parallel.multiply import check_blocks, features, split_multiply
from monarch_flow.parallel.traffic import Traffic, backward_traffic, forward_traffic

__all__ = [
    "SPLIT",
    "WHOLE",
    "ParallelBlockdiagLinear",
    "ParallelMonarchLinear",
    "Traffic",
    "backward_traffic",
    "check_blocks",
    "features",
    "forward_traffic",
    "split_multiply",
]
