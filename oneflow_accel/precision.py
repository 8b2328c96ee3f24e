"""Precision of training as a choice: what tensors and products are made of, by one set of names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.backends import delegate_of
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import oneflow as flow

PRECISIONS = {
    "float32": "all in float32",
    "float32-bf16-products": "tensors and convolutions in float32, matrix products in bfloat16, "
    "added up in float32",
    "bfloat16": "activations and products in bfloat16; weights, statistics, softmax and loss in "
    "float32",
    "float16": "the same in float16, with a scaled loss",
}
# The dtype that matrix products are computed in, and what autocast makes of float32 where it runs.
PRODUCTS = {name: name for name in PRECISIONS} | {"float32-bf16-products": "bfloat16"}
CASTS = {"bfloat16": flow.bfloat16, "float16": flow.float16}
# What PyTorch Lightning, timm and older configs of ours call them.
_ALIASES = {
    "32": "float32",
    "fp32": "float32",
    "16": "float16",
    "fp16": "float16",
    "16-mixed": "float16",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
}
# The features of `Backend.supports` that they need.
_FEATURES = {
    "float32-bf16-products": "bfloat16_products",
    "bfloat16": "bfloat16_training",
    "float16": "amp",
}


def canonical(value: str | int) -> str:
    """The name in PRECISIONS that this is or stands for (32, 16, "bf16", ...); else UserError."""
    name = _ALIASES.get(str(value), str(value))
    if name not in PRECISIONS:
        raise UserError(f"precision {value!r} is none of {', '.join(PRECISIONS)}")
    return name


def feature_of(precision: str) -> str | None:
    """The feature that a device needs for it, a key of `backends.base.FEATURES`."""
    return _FEATURES.get(precision)


def why_not(backend: Backend, precision: str) -> str | None:
    """Why the device cannot train so, or None if it can."""
    feature = feature_of(precision)
    support = None if feature is None else backend.supports(feature)
    return None if support is None or support else support.reason


def autocast(backend: Backend, precision: str) -> AbstractContextManager[Any]:
    """What the forward pass and the loss of a training step run in; the backward pass does not."""
    if precision not in CASTS:
        return nullcontext()
    if not backend.supports("bfloat16_collectives") and distributed.world_size() > 1:
        _move_as_float32()
    return flow.autocast(device_type=delegate_of(backend.name), dtype=CASTS[precision])


@lru_cache(maxsize=1)
def _move_as_float32() -> None:
    """Let `to_global` move bfloat16 between processes as float32, and give bfloat16. CPUs add up no
    bfloat16. Under autocast OneFlow sends float32 in its place, but gives that, and its gradient
    goes to a product in bfloat16, which refuses it. A graph's own moves keep what they get."""
    to_global = flow.Tensor.to_global

    def moved(self: flow.Tensor, *args: Any, **kwargs: Any) -> flow.Tensor:
        if self.dtype != flow.bfloat16 or self.is_lazy or not self.is_global:
            return to_global(self, *args, **kwargs)
        return to_global(self.float(), *args, **kwargs).to(flow.bfloat16)

    flow.Tensor.to_global = moved


def autocast_of_now(x: flow.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """What runs now on the device of `x`, for a backward pass, which runs outside, to compute again
    in."""
    if not flow.is_autocast_enabled():
        return nullcontext
    device = delegate_of(x.placement.type if x.is_global else x.device.type)
    dtype = flow.get_autocast_gpu_dtype() if x.is_cuda else flow.get_autocast_cpu_dtype()
    return partial(flow.autocast, device_type=device, dtype=dtype)


def set_products(precision: str) -> None:
    """From now on float32 products of this process are computed as `precision` has them, backward
    passes included: "bfloat16" rounds those that autocast has left, such as a loss's own. Waits for
    those that were asked for before."""
    state = plugin.state()
    if state.loaded:
        flow._oneflow_internal.eager.Sync()
        library = ctypes.CDLL(str(state.path))
        library.oneflow_accel_set_bfloat16_products(int(PRODUCTS[precision] == "bfloat16"))
