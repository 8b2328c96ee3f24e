"""Batch normalization, alone and with an addition and relu, by a batch's statistics and by fixed
ones."""

from __future__ import annotations

from oneflow_accel.kernels import normalization

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.not_finite import Strictness
from tests.oneflow_accel.kernels.record import Case, Input, Record, Shape, case

EPSILON = 1e-5
MOMENTUM = 0.1
BOTH = ("float32", "bfloat16")

# (shape, channel axis)
SHAPES: dict[str, tuple[Shape, int]] = {
    "nchw": ((4, 5, 7, 3), 1),
    "nhwc": ((4, 7, 3, 5), 3),
    "nchw-large-planes": ((2, 3, 50, 30), 1),
    "nhwc-many-channels": ((3, 3, 2, 1030), 3),
    "2d-many-rows": ((5000, 3), 1),
    "3d-many-samples": ((130, 2, 3), 1),
    "5d-middle-axis": ((3, 4, 5, 2, 3), 2),
    "one-channel": ((3, 1, 1, 1), 1),
    "empty": ((0, 3, 4, 4), 1),
    "empty-last": ((0, 4, 4, 3), 3),
}


def along(values: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def reduced_axes(x: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis)


def batch_statistics(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    axes, count = reduced_axes(x, axis), max(1, x.size // max(1, x.shape[axis]))
    mean = x.sum(axes) / count
    return mean, np.square(x - along(mean, x, axis)).sum(axes) / count


def fixed_statistics(channels: int) -> tuple[np.ndarray, np.ndarray]:
    return np.linspace(-0.5, 0.7, channels), np.linspace(0.5, 2.0, channels)


def batch_norm(
    x: flow.Tensor,
    gamma: flow.Tensor,
    beta: flow.Tensor,
    axis: int,
    statistics: tuple[flow.Tensor, flow.Tensor] | None = None,
    training: bool = True,
) -> flow.Tensor:
    mean, variance = statistics or (None, None)
    if x.dtype == flow.bfloat16:
        channels = gamma.shape[0]
        return normalization.batch_norm(
            x,
            flow.zeros(channels) if mean is None else mean,
            flow.ones(channels) if variance is None else variance,
            # In mixed precision parameters are float32.
            gamma.to(flow.float32),
            beta.to(flow.float32),
            axis=axis,
            epsilon=EPSILON,
            momentum=MOMENTUM,
            is_training=training,
        )
    return flow._C.normalization(x, mean, variance, gamma, beta, axis, EPSILON, MOMENTUM, training)


def batch_norm_add_relu(
    x: flow.Tensor,
    gamma: flow.Tensor,
    beta: flow.Tensor,
    *addend: flow.Tensor,
    axis: int,
    statistics: tuple[flow.Tensor, flow.Tensor] | None = None,
) -> flow.Tensor:
    mean, variance = statistics or (None, None)
    gamma, beta = gamma.to(flow.float32), beta.to(flow.float32)
    return flow._C.normalization_add_relu(
        x, addend[0] if addend else None, mean, variance, gamma, beta, axis, EPSILON, MOMENTUM, True
    )


def _fixed(x: flow.Tensor, gamma: flow.Tensor, beta: flow.Tensor, axis: int) -> flow.Tensor:
    statistics = fixed_statistics(gamma.shape[0])
    mean, variance = (flow.tensor(values.astype(np.float32)) for values in statistics)
    return batch_norm(x, gamma, beta, axis, (mean, variance), training=False)


def _scaled(
    x: np.ndarray, axis: int, mean: np.ndarray, variance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """x_hat and 1 / the deviation."""
    inverse = along(1 / np.sqrt(variance + EPSILON), x, axis)
    return (x - along(mean, x, axis)) * inverse, inverse


def reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, axis: int) -> np.ndarray:
    x_hat, _ = _scaled(x, axis, *batch_statistics(x, axis))
    return x_hat * along(gamma, x, axis) + along(beta, x, axis)


def gradient(
    dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, axis: int
) -> tuple[np.ndarray, ...]:
    x_hat, inverse = _scaled(x, axis, *batch_statistics(x, axis))
    axes, count = reduced_axes(x, axis), max(1, x.size // x.shape[axis])
    dgamma, dbeta = (dy * x_hat).sum(axes), dy.sum(axes)
    means = (along(dbeta, x, axis) + x_hat * along(dgamma, x, axis)) / count
    return along(gamma, x, axis) * inverse * (dy - means), dgamma, dbeta


def _fixed_reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, axis: int) -> np.ndarray:
    x_hat, _ = _scaled(x, axis, *fixed_statistics(len(gamma)))
    return x_hat * along(gamma, x, axis) + along(beta, x, axis)


def _fixed_gradient(
    dy: np.ndarray, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, axis: int
) -> tuple[np.ndarray, ...]:
    x_hat, inverse = _scaled(x, axis, *fixed_statistics(len(gamma)))
    axes = reduced_axes(x, axis)
    return dy * along(gamma, x, axis) * inverse, (dy * x_hat).sum(axes), dy.sum(axes)


def _relu_reference(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, *addend: np.ndarray, axis: int
) -> np.ndarray:
    total = reference(x, gamma, beta, axis) + (addend[0] if addend else 0.0)
    return np.where(total <= 0, 0.0, total)


def _relu_gradient(
    dy: np.ndarray,
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray,
    *addend: np.ndarray,
    axis: int,
) -> tuple[np.ndarray, ...]:
    y = _relu_reference(x, gamma, beta, *addend, axis=axis)
    masked = np.where(y == 0, 0.0, dy)
    return (*gradient(masked, x, gamma, beta, axis), *([masked] if addend else []))


def _input(shape: Shape, axis: int) -> Input:
    """Channels have different means and scales."""

    def make(generator: np.random.Generator) -> np.ndarray:
        x = generator.standard_normal(shape)
        scale, mean = generator.standard_normal((2, shape[axis]))
        return x * along(1 + scale**2, x, axis) + along(3 * mean, x, axis)

    return make


def _cases(addend: bool = False, names: tuple[str, ...] = tuple(SHAPES)) -> list[Case]:
    return [
        case(
            name,
            _input(shape, axis),
            *[(shape[axis],)] * 2,
            *[shape] * addend,
            reduced=max(1, int(np.prod(shape)) // shape[axis]),
            axis=axis,
        )
        for name, (shape, axis) in SHAPES.items()
        if name in names
    ]


RECORDS = [
    Record(
        "batch_norm",
        ("normalization", "normalization_grad"),
        batch_norm,
        reference,
        _cases(),
        gradient=gradient,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
        not_finite=Strictness.REGROUPED,
    ),
    Record(
        "batch_norm_of_fixed_statistics",
        ("normalization", "normalization_grad"),
        _fixed,
        _fixed_reference,
        _cases(names=("nchw", "nhwc", "empty", "nhwc-many-channels")),
        gradient=_fixed_gradient,
        dtypes=BOTH,
        gradient_dtypes=BOTH,
        not_finite=Strictness.REGROUPED,
    ),
    *(
        Record(
            name,
            ("normalization_add_relu", "normalization_add_relu_grad"),
            batch_norm_add_relu,
            _relu_reference,
            _cases(addend, names=tuple(name for name in SHAPES if "empty" not in name)),
            gradient=_relu_gradient,
            dtypes=BOTH,
            gradient_dtypes=BOTH,
            not_finite=Strictness.REGROUPED,
        )
        for name, addend in (("batch_norm_add_relu", True), ("batch_norm_relu", False))
    ),
]
