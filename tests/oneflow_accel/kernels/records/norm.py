"""layer_norm and rms_norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Layout, Record, case

Gradients = tuple[np.ndarray, ...]


def _row_axes(x: np.ndarray, axis: int) -> tuple[int, ...]:
    return tuple(range(axis, x.ndim))


def _normalized(x: np.ndarray, axis: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    axes = _row_axes(x, axis)
    inv_std = 1.0 / np.sqrt(x.var(axes, keepdims=True) + epsilon)
    return (x - x.mean(axes, keepdims=True)) * inv_std, inv_std


def _layer_norm(
    x: np.ndarray, *gamma_beta: np.ndarray, axis: int = 1, epsilon: float = 1e-5
) -> np.ndarray:
    x_hat = _normalized(x, axis, epsilon)[0]
    return x_hat * gamma_beta[0] + gamma_beta[1] if gamma_beta else x_hat


def _layer_norm_grad(
    dy: np.ndarray, x: np.ndarray, *gamma_beta: np.ndarray, axis: int = 1, epsilon: float = 1e-5
) -> Gradients:
    x_hat, inv_std = _normalized(x, axis, epsilon)
    axes = _row_axes(x, axis)
    g = dy * gamma_beta[0] if gamma_beta else dy
    dx = inv_std * (g - g.mean(axes, keepdims=True) - x_hat * (g * x_hat).mean(axes, keepdims=True))
    over_rows = tuple(range(axis))
    return (dx, (dy * x_hat).sum(over_rows), dy.sum(over_rows)) if gamma_beta else (dx,)


def _call_layer_norm(
    x: flow.Tensor, *gamma_beta: flow.Tensor, axis: int = 1, epsilon: float = 1e-5
) -> flow.Tensor:
    return flow.nn.functional.layer_norm(x, tuple(x.shape[axis:]), *gamma_beta, eps=epsilon)


def _call_with_residual(x: flow.Tensor, *gamma_beta: flow.Tensor) -> flow.Tensor:
    """In a graph layer_norm_grad is handed the other gradient of x as _add_to_output."""
    return x + _call_layer_norm(x, *gamma_beta) * 0.5


def _residual_grad(dy: np.ndarray, x: np.ndarray, *gamma_beta: np.ndarray) -> Gradients:
    dx, *others = _layer_norm_grad(0.5 * dy, x, *gamma_beta)
    return (dx + dy, *others)


def _rms_norm(
    x: np.ndarray, *weight: np.ndarray, axis: int = 1, epsilon: float = 1e-6
) -> np.ndarray:
    inv_rms = 1.0 / np.sqrt((x * x).mean(_row_axes(x, axis), keepdims=True) + epsilon)
    return x * inv_rms * (weight[0] if weight else 1.0)


def _rms_norm_grad(
    dy: np.ndarray, x: np.ndarray, *weight: np.ndarray, axis: int = 1, epsilon: float = 1e-6
) -> Gradients:
    axes = _row_axes(x, axis)
    inv_rms = 1.0 / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon)
    x_hat = x * inv_rms
    g = dy * weight[0] if weight else dy
    dx = inv_rms * (g - x_hat * (g * x_hat).mean(axes, keepdims=True))
    return (dx, (dy * x_hat).sum(tuple(range(axis)))) if weight else (dx,)


def _call_rms_norm(
    x: flow.Tensor, *weight: flow.Tensor, axis: int = 1, epsilon: float = 1e-6
) -> flow.Tensor:
    return flow._C.rms_norm(x, weight[0] if weight else None, tuple(x.shape[axis:]), epsilon)


def _shifted(*shape: int, mean: float) -> Any:
    """Rows whose mean is large against their deviation."""
    return lambda generator: generator.standard_normal(shape) + mean


ALL = ("float32", "float64", "bfloat16")

RECORDS = [
    Record(
        "layer_norm",
        ("layer_norm", "layer_norm_grad", "layer_norm_param_grad"),
        _call_layer_norm,
        _layer_norm,
        (
            case("global", (4, 6, 10), (10,), (10,), axis=2, reduced=24),
            case("no_affine", (5, 17), reduced=17),
            case("two_axes", (3, 7, 5), (7, 5), (7, 5), reduced=35),
            # A row of one element has the variance 0: only epsilon bounds its gradient.
            case("one_element", (6, 1), (1,), (1,), epsilon=0.5, reduced=6),
            case("one_row", (1, 33), (33,), (33,), reduced=33),
            case("long_rows", (3, 5003), (5003,), (5003,), reduced=5003),
            case("threads", (1576, 192), (192,), (192,), reduced=1576),
            case("large_mean", _shifted(8, 64, mean=20.0), (64,), (64,), reduced=640),
            case("empty", (0, 8), (8,), (8,)),
        ),
        gradient=_layer_norm_grad,
        layouts=(
            Layout(("S(0)", "B", "B"), "S(0)"),
            Layout(("S(1)", "B", "B"), "S(1)"),
            Layout(("B", "B", "B"), "B"),
        ),
        dtypes=ALL,
        gradient_dtypes=ALL,
    ),
    Record(
        "layer_norm_with_residual",
        ("layer_norm", "layer_norm_grad", "layer_norm_param_grad"),
        _call_with_residual,
        lambda x, *gamma_beta: x + _layer_norm(x, *gamma_beta) * 0.5,
        (case("odd", (6, 48), (48,), (48,), reduced=48),),
        gradient=_residual_grad,
    ),
    Record(
        "rms_norm",
        ("rms_norm", "rms_norm_grad", "rms_norm_param_grad"),
        _call_rms_norm,
        _rms_norm,
        (
            case("global", (4, 6, 10), (10,), axis=2, reduced=24),
            case("no_weight", (5, 17), reduced=17),
            case("two_axes", (3, 7, 5), (7, 5), reduced=35),
            case("one_element", (6, 1), (1,), epsilon=0.5, reduced=6),
            case("threads", (1576, 192), (192,), reduced=1576),
            case("empty", (0, 8), (8,)),
        ),
        gradient=_rms_norm_grad,
        layouts=(Layout(("S(0)", "B"), "S(0)"), Layout(("S(1)", "B"), "S(1)")),
        dtypes=ALL,
        gradient_dtypes=ALL,
    ),
]
