"""Convolutions: "channels_last_conv2d", of (N, H, W, C) with standard weights, and for inference
"conv2d_add_activation", with all that follows it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels import plugin
from oneflow_accel.kernels.operators import Operator, differentiable, gradient_reasons
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    register_operation,
)
from oneflow_accel.patching.runtime import device_supports

import numpy as np
import oneflow as flow

Pair = tuple[int, int]

_TYPES = {
    "kernel_size": "list_int32",
    "strides": "list_int32",
    "padding_before": "list_int32",
    "dilation_rate": "list_int32",
    "groups": "int32",
}

_forward = Operator(
    "oneflow_accel_channels_last_conv2d",
    ("in", "weight", "bias"),
    ("out",),
    _TYPES,
    optional=("bias",),
)
_data_grad = Operator(
    "oneflow_accel_channels_last_conv2d_data_grad",
    ("out_grad", "in", "weight"),
    ("in_grad",),
    _TYPES,
)
_filter_grad = Operator(
    "oneflow_accel_channels_last_conv2d_filter_grad",
    ("out_grad", "in", "weight"),
    ("weight_grad", "bias_grad"),
    _TYPES,
)


def channels_last_conv2d(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> flow.Tensor:
    """Two-dimensional convolution of activations whose channels lie last: x (N, H, W, C), weight
    (O, C / groups, h, w) of the same dtype and bias (O,) give (N, H', W', O). Global tensors may be
    split along N, with weight and bias broadcast. ValueError if the shapes do not fit.

    Tokens (N, H W, C) are such activations as they are, so that a model which has both attention
    and convolutions needs no transposes between them. Weights have the order of checkpoints.
    """
    shape, size = tuple(x.shape), tuple(weight.shape)
    if len(shape) != 4 or len(size) != 4 or groups < 1 or size[0] % groups:
        raise ValueError(
            f"x {shape} and weight {size} with {groups} groups are not (N, H, W, C) and "
            "(O, C / groups, h, w)"
        )
    if shape[3] != size[1] * groups:
        raise ValueError(
            f"x {shape} has {shape[3]} channels, and weight {size} with {groups} groups takes "
            f"{size[1] * groups}"
        )
    if bias is not None and tuple(bias.shape) != size[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} is not {size[:1]}")
    for axis in range(2):
        reach = dilation[axis] * (size[2 + axis] - 1) + 1
        if reach > shape[1 + axis] + 2 * padding[axis]:
            raise ValueError(
                f"x {shape} with {padding} zeros around it is smaller than the kernel of weight "
                f"{size}, which reaches over {reach} pixels"
            )
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _operation(x, weight, bias, **geometry)


def _reference(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None, **geometry: Any
) -> flow.Tensor:
    channels_first = x.permute(0, 3, 1, 2)
    y = flow._C.conv2d(channels_first, weight, bias, **geometry, channel_pos="channels_first")
    return y.permute(0, 2, 3, 1)


_operation = register_operation(
    "channels_last_conv2d",
    reference=_reference,
    doc="convolution of x (N, H, W, C) with weight (O, C / groups, h, w) and bias (O,)",
)


def _backward(kept: Any, y_grad: flow.Tensor, *, x_has_gradient: bool, **geometry: Any) -> Any:
    # Images, which a model's first convolutions see, need none, and theirs would be the most
    # expensive one.
    x_grad = _data_grad(y_grad, *kept, **geometry)[0] if x_has_gradient else None
    return (x_grad, *_filter_grad(y_grad, *kept, **geometry))


@differentiable(_forward.name, _backward, autocast=flow.bfloat16)
def _convolved(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None,
    *,
    x_has_gradient: bool,
    **geometry: Any,
) -> Any:
    return _forward(x, weight, bias, **geometry)[0], (x, weight)


@cpu_implementation("channels_last_conv2d", _forward)
def where_they_lie(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None, **geometry: Any
) -> flow.Tensor:
    """Activations are read and written in their own order; only the weights are copied."""
    return _convolved(
        *(x, weight, bias),
        x_has_gradient=x.requires_grad,
        kernel_size=tuple(weight.shape[2:]),
        **_attributes(**geometry),
    )


def _attributes(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> dict[str, Any]:
    """A convolution's geometry as the operators call it."""
    return {
        "strides": tuple(stride),
        "padding_before": tuple(padding),
        "dilation_rate": tuple(dilation),
        "groups": groups,
    }


@implementation(
    "channels_last_conv2d",
    backend=CudaBackend.name,
    dtypes=(flow.float32, flow.float16),
    never_run=True,
)
@implementation(
    "channels_last_conv2d",
    backend=MluBackend.name,
    dtypes=(flow.float32, flow.float16),
    never_run=True,
)
def channels_last_operator(
    x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor | None, **geometry: Any
) -> flow.Tensor:
    """OneFlow's own operator, which takes weights in the order of the activations."""
    weight = weight.permute(0, 2, 3, 1)
    return flow._C.conv2d(x, weight, bias, **geometry, channel_pos="channels_last")


_fused = Operator(
    "oneflow_accel_conv2d",
    inputs=("in", "weight", "bias", "summand"),
    outputs=("out",),
    attributes={"data_format": "string", **_TYPES, "activation": "string", "owner": "int64"},
    optional=("bias", "summand"),
)


def new_owner() -> int:
    """A number for one set of weights, which kernels may then keep in a layout of their own until
    something writes to them; to be given back with `release_weights`."""
    library = _library()
    return 0 if library is None else library.oneflow_accel_new_owner()


def release_weights(owner: int) -> None:
    """Drop what kernels keep of an owner's weights, of which calls may still be queued."""
    library = _library()
    if library is not None:
        library.oneflow_accel_release_weights(owner)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    if _fused.missing_reasons():
        return None
    library = ctypes.CDLL(str(plugin.state().path))
    library.oneflow_accel_new_owner.restype = ctypes.c_int64
    library.oneflow_accel_release_weights.argtypes = [ctypes.c_int64]
    _see_all_writes(library)
    return library


def _see_all_writes(library: ctypes.CDLL) -> None:
    """Two methods of tensors write by no kernel: one goes by a kernel from here on, and copies of
    weights that the other has written to are dropped when it has ended, which it waits for. So are
    those of memory that is not OneFlow's, when it comes: weights may have lain there before."""
    zero, copy_from_numpy = flow.Tensor.zero_, flow.Tensor._copy_from_numpy

    def drop(memory: np.ndarray) -> None:
        begin, end = np.byte_bounds(memory)
        library.oneflow_accel_drop_copies(ctypes.c_void_p(begin), ctypes.c_int64(end - begin))

    def by_kernel(tensor: flow.Tensor) -> flow.Tensor:
        if not tensor.is_floating_point():
            return zero(tensor)
        with flow.no_grad():
            tensor.copy_(flow.zeros_like(tensor))
        return tensor

    def seen(tensor: flow.Tensor, array: Any) -> None:
        copy_from_numpy(tensor, array)
        if device_supports(tensor, "host_memory"):
            drop(tensor.detach().numpy())

    def of_others(make: Callable[[Any], flow.Tensor]) -> Callable[[Any], flow.Tensor]:
        def made(source: Any) -> flow.Tensor:
            tensor = make(source)
            if isinstance(source, np.ndarray):
                drop(source)
            elif device_supports(tensor, "host_memory"):
                drop(tensor.numpy())
            return tensor

        return made

    flow.Tensor.zero_, flow.Tensor._copy_from_numpy = by_kernel, seen
    flow.from_numpy, flow.from_dlpack = of_others(flow.from_numpy), of_others(flow.from_dlpack)


def _fused_reference(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None,
    summand: flow.Tensor | None,
    *,
    data_format: str,
    activation: str,
    owner: int,
    **geometry: Any,
) -> flow.Tensor:
    if data_format == "channels_last" and not device_supports(x, "nhwc"):
        # A map layer's, which a device needs no channels-last kernels for.
        y = channels_last_conv2d(x, weight.permute(0, 3, 1, 2), bias, **geometry)
    else:
        y = flow._C.conv2d(x, weight, bias, **geometry, channel_pos=data_format)
    if summand is not None:
        y = y + summand
    return getattr(flow, activation)(y) if activation else y


conv2d_add_activation = register_operation(
    "conv2d_add_activation",
    reference=_fused_reference,
    doc="relu or silu of conv2d(x, weight) + bias + summand for inference, all but the convolution "
    "optional",
    lacks={
        CudaBackend.name: "OneFlow 0.9.0 joins no convolution with what follows it: cuDNN's, then "
        "the sum and the activation",
        MluBackend.name: "oneflow_mlu joins no convolution with what follows it: one after another",
    },
)


@cpu_implementation("conv2d_add_activation", _fused, not_supported_reasons=gradient_reasons)
def onednn(
    x: flow.Tensor,
    weight: flow.Tensor,
    *others: flow.Tensor | None,
    data_format: str,
    activation: str,
    owner: int,
    **geometry: Any,
) -> flow.Tensor:
    first = 1 if data_format == "channels_last" else 2
    (y,) = _fused(
        *(x, weight, *others),
        data_format=data_format,
        kernel_size=tuple(weight.shape[first : first + 2]),
        **_attributes(**geometry),
        activation=activation,
        owner=owner,
    )
    return y
