"""Models on LiBai's parallel layers, each written once for training and for generation.

`gpt2/` is a model; the files beside it are what models share.
"""

# Before any part of it imports oneflow: see oneflow_accel.
import oneflow_accel  # noqa: F401
