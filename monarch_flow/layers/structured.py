"""What all structured linear layers share: padding, cropping, bias and the dense matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import check_positive

# Fills a dense matrix (out, in) in place, as nn.init's functions do.
InitFunction = Callable[[flow.Tensor], Any]
# Functions that read a config's value, by option.
OptionReaders = dict[str, Callable[[Any], Any]]


class StructuredLinear(nn.Module):
    """x M^T + bias for a matrix M (out_features, in_features) that is not stored whole.

    A subclass makes its parameters, calls `reset_parameters` and computes `structured_matmul` on
    the extended widths: the input is padded with zeros at its end, the output is cropped there.
    """

    option_readers: ClassVar[OptionReaders] = {}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features = check_positive("in_features", in_features)
        self.out_features = check_positive("out_features", out_features)
        self.in_features_extended = self.in_features
        self.out_features_extended = self.out_features
        self.bias: flow.Tensor | None
        if bias:
            self.bias = new_parameter((out_features,), device, dtype)
        else:
            self.register_parameter("bias", None)

    @property
    def saving(self) -> float:
        """Stored weights over those of a dense matrix, n m; the bias is not counted."""
        return self.macs_per_row() / (self.in_features * self.out_features)

    def macs_per_row(self) -> int:
        """Multiply-accumulates for one input row: the number of weights, without the bias."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all parameters anew: the weights of a matrix drawn as nn.Linear's, then the bias."""
        self.draw_from(dense_default)
        self.reset_bias()

    def reset_dense_init(
        self, init_function: InitFunction, bias_init_function: InitFunction | None = None
    ) -> None:
        """Draw the weights as a model that initialises a dense matrix this way wants them.

        Made for nn.Module.apply: layers inside this one are left to their own call. None as
        `bias_init_function` fills the bias with zeros.
        """
        self.draw_from(init_function)
        self.reset_bias_with(bias_init_function)

    def draw_from(self, init_function: InitFunction) -> None:
        """Draw the weights that stand for a dense matrix filled by `init_function`."""
        raise NotImplementedError

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T, 2 or more axes: (..., in_features_extended) to (..., out_features_extended)."""
        raise NotImplementedError

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T + bias: (..., in_features) to (..., out_features); ValueError for another width."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a linear layer of (..., {self.in_features}) got an input of {tuple(x.shape)}"
            )
        return self.with_bias(x.unsqueeze(0)).squeeze(0) if x.ndim == 1 else self.with_bias(x)

    def with_bias(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T + bias, for an x of `matmul`."""
        return self.add_bias(self.matmul(x))

    def matmul(self, x: flow.Tensor) -> flow.Tensor:
        """x M^T without the bias: (..., in_features), of 2 or more axes, to (..., out_features)."""
        return self.crop(self.structured_matmul(self.pad(x)))

    def pad(self, x: flow.Tensor) -> flow.Tensor:
        missing = self.in_features_extended - x.shape[-1]
        return nn.functional.pad(x, (0, missing)) if missing else x

    def crop(self, y: flow.Tensor) -> flow.Tensor:
        if y.shape[-1] == self.out_features:
            return y
        return y.narrow(y.ndim - 1, 0, self.out_features)

    def add_bias(self, y: flow.Tensor) -> flow.Tensor:
        """y + bias, in y's dtype: under mixed precision the bias is wider than the product."""
        bias = self.read_bias()
        if bias is None:
            return y
        return y + (bias if bias.dtype == y.dtype else bias.to(y.dtype))

    def read_bias(self) -> flow.Tensor | None:
        """The bias for one forward pass."""
        return self.bias

    def dense(self) -> flow.Tensor:
        """M, (out_features, in_features), in the parameters' dtype; gradients flow through it."""
        return self.matmul(identity(self.in_features, next(self.parameters()))).transpose(0, 1)

    def bias_fan(self) -> int:
        """The bias starts as U(-b, b) with b = 1 / sqrt(this)."""
        return self.out_features

    def reset_bias(self) -> None:
        if self.bias is not None:
            uniform(self.bias, self.bias_fan())

    def reset_bias_with(self, bias_init_function: InitFunction | None) -> None:
        if self.bias is None:
            return
        with flow.no_grad():
            (bias_init_function or nn.init.zeros_)(self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, saving={self.saving:.4f}"
        )


def new_parameter(shape: tuple[int, ...], device: Any, dtype: Any) -> nn.Parameter:
    return nn.Parameter(flow.zeros(*shape, device=device, dtype=dtype or flow.float32))


def uniform(tensor: flow.Tensor, fan_in: float) -> None:
    """Fill with U(-b, b), b = 1 / sqrt(fan_in): Kaiming's rule (He et al. 2015), slope sqrt(5)."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(tensor, -bound, bound)


def dense_default(tensor: flow.Tensor) -> None:
    """Fill a dense matrix (out, in) as nn.Linear does."""
    uniform(tensor, tensor.shape[-1])


def drawn_dense(rows: int, columns: int, init_function: InitFunction) -> np.ndarray:
    """A dense matrix (rows, columns), float32, filled by `init_function`, as an array."""
    # Not empty(), which is of device 0 on every process: its generator would draw.
    matrix = flow.zeros(rows, columns)
    init_function(matrix)
    return matrix.numpy()


def fill(parameter: flow.Tensor, values: np.ndarray) -> None:
    """Put an array of the same shape into a local parameter, in its dtype."""
    with flow.no_grad():
        parameter.copy_(flow.tensor(values, dtype=parameter.dtype, device=parameter.device))


def identity(size: int, like: flow.Tensor) -> flow.Tensor:
    """The identity matrix, placed as `like` and of its dtype; a global one is on every rank."""
    place: dict[str, Any] = {}
    if like.is_global:
        place = {"placement": like.placement, "sbp": [flow.sbp.broadcast] * len(like.sbp)}
    else:
        place = {"device": like.device}
    return flow.eye(size, **place).to(like.dtype)
