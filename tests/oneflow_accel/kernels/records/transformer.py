"""Rotary position embedding, RMS norm of a sum, SwiGLU."""

from __future__ import annotations

from typing import Any

from oneflow_accel.kernels.transformer import add_rms_norm, rope, swiglu
from oneflow_accel.kernels.weight_dropout import kept_weights

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Layout, Record, case

Gradients = tuple[np.ndarray | None, ...]


def _turned(
    x: np.ndarray, angles: np.ndarray, sign: float, axis: int, interleaved: bool
) -> np.ndarray:
    """Each pair by the matrix (cos, -sin; sin, cos)."""
    dim = x.shape[-1]
    shape = [1] * (x.ndim - 1) + [dim // 2]
    shape[axis] = x.shape[axis]
    cosine, sine = np.cos(angles.reshape(shape)), sign * np.sin(angles.reshape(shape))
    halves = (slice(0, dim // 2), slice(dim // 2, None))
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else halves
    a, b = x[..., first], x[..., second]
    out = np.empty_like(x)
    out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return out


def _rope(
    x: np.ndarray, angles: np.ndarray, axis: int = 1, interleaved: bool = False
) -> np.ndarray:
    return _turned(x, angles, 1.0, axis, interleaved)


def _rope_gradient(
    dy: np.ndarray, x: np.ndarray, angles: np.ndarray, axis: int = 1, interleaved: bool = False
) -> Gradients:
    return _turned(dy, angles, -1.0, axis, interleaved), None


def _call_rope(x: flow.Tensor, angles: flow.Tensor, **attributes: Any) -> flow.Tensor:
    angles = angles.detach().to(flow.float32)
    return rope(x, angles.cos(), angles.sin(), **attributes)


def _rms(total: np.ndarray, epsilon: float) -> np.ndarray:
    return 1.0 / np.sqrt((total * total).mean(-1, keepdims=True) + epsilon)


def _kept(x: np.ndarray, dropout: float, seed: int) -> np.ndarray | float:
    """What elements are multiplied by: places (batch, time, ..., n) as attention has them."""
    if not dropout:
        return 1.0
    time = x.shape[1] if x.ndim > 2 else 1
    places = (x.shape[0], time, int(np.prod(x.shape[2:-1])), x.shape[-1])
    return kept_weights(seed, places, dropout).reshape(x.shape) / (1 - dropout)


def _add_rms_norm(
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    epsilon: float = 1e-5,
    dropout: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    total = x * _kept(x, dropout, seed) + residual
    return total * _rms(total, epsilon) * weight + 2.0 * total


def _add_rms_norm_gradient(
    dy: np.ndarray,
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    epsilon: float = 1e-5,
    dropout: float = 0.0,
    seed: int = 0,
) -> Gradients:
    kept = _kept(x, dropout, seed)
    total = x * kept + residual
    scale = _rms(total, epsilon)
    hat, g = total * scale, dy * weight
    dx = scale * (g - hat * (g * hat).mean(-1, keepdims=True)) + 2.0 * dy
    return dx * kept, dx, (dy * hat).reshape(-1, len(weight)).sum(0)


def _call_add_rms_norm(
    *tensors: flow.Tensor, epsilon: float = 1e-5, dropout: float = 0.0, seed: int = 0
) -> flow.Tensor:
    drop = {}
    if dropout:
        place = {}
        if tensors[0].is_global:
            sbp = [flow.sbp.broadcast] * len(tensors[0].sbp)
            place = {"placement": tensors[0].placement, "sbp": sbp}
        drop = {"dropout": dropout, "seed": flow.tensor([seed], dtype=flow.int64, **place)}
    y, total = add_rms_norm(*tensors, epsilon=epsilon, **drop)
    return y + 2.0 * total


def _swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1.0 + np.exp(-gate)) * up


def _swiglu_gradient(dy: np.ndarray, gate: np.ndarray, up: np.ndarray) -> Gradients:
    s = 1.0 / (1.0 + np.exp(-gate))
    return dy * up * (s + gate * s * (1.0 - s)), dy * gate * s


BOTH = ("float32", "bfloat16")

_ROWS: dict[str, Any] = {
    "layouts": (
        Layout(("S(0)", "S(0)", "B"), "S(0)"),
        Layout(("S(1)", "S(1)", "B"), "S(1)"),
        Layout(("B", "B", "B"), "B"),
    ),
    "dtypes": BOTH,
    "gradient_dtypes": BOTH,
}

RECORDS = [
    Record(
        "rope",
        ("oneflow_accel_rope",),
        _call_rope,
        _rope,
        (
            case("global", (2, 6, 4, 10), (6, 5)),
            case("interleaved", (2, 7, 3, 6), (7, 3), interleaved=True),
            case("sequence first", (5, 2, 3, 8), (5, 4), axis=0),
            case("heads first", (2, 3, 5, 8), (5, 4), axis=2, interleaved=True),
            case("one pair", (3, 2), (3, 1), axis=0),
            case("threads", (2, 129, 8, 64), (129, 32)),
            case("empty", (0, 4, 2, 6), (4, 3)),
        ),
        gradient=_rope_gradient,
        layouts=(
            Layout(("S(0)", "B"), "S(0)"),
            Layout(("S(1)", "S(0)"), "S(1)"),
            Layout(("S(2)", "B"), "S(2)"),
        ),
        dtypes=("float32",),
    ),
    Record(
        "add_rms_norm",
        ("oneflow_accel_add_rms_norm", "oneflow_accel_add_rms_norm_grad"),
        _call_add_rms_norm,
        _add_rms_norm,
        (
            case("global", (4, 6, 10), (4, 6, 10), (10,), reduced=24),
            case("one element", (6, 1), (6, 1), (1,), epsilon=0.5, reduced=6),
            case("long rows", (3, 5003), (3, 5003), (5003,), reduced=5003),
            case("threads", (1576, 192), (1576, 192), (192,), reduced=1576),
            case("empty", (0, 8), (0, 8), (8,)),
        ),
        gradient=_add_rms_norm_gradient,
        **_ROWS,
    ),
    Record(
        "dropout_add_rms_norm",
        (
            "oneflow_accel_add_rms_norm",
            "oneflow_accel_add_rms_norm_grad",
            "oneflow_accel_add_rms_norm_x_grad",
        ),
        _call_add_rms_norm,
        _add_rms_norm,
        (
            case("global", (4, 6, 10), (4, 6, 10), (10,), dropout=0.4, seed=5, reduced=24),
            case("rows", (37, 130), (37, 130), (130,), dropout=0.1, seed=-1, reduced=130),
            case("four axes", (2, 3, 5, 9), (2, 3, 5, 9), (9,), dropout=0.5, seed=2, reduced=30),
            case("empty", (0, 8), (0, 8), (8,), dropout=0.5, seed=2),
        ),
        gradient=_add_rms_norm_gradient,
        **_ROWS,
    ),
    Record(
        "swiglu",
        ("oneflow_accel_swiglu", "oneflow_accel_swiglu_grad"),
        swiglu,
        _swiglu,
        (
            case("global", (4, 6, 10), (4, 6, 10)),
            case("one", (1,), (1,)),
            case("steep", lambda g: 6 * g.standard_normal((5, 33)), (5, 33)),
            case("threads", (64, 1024), (64, 1024)),
            case("empty", (0, 8), (0, 8)),
        ),
        gradient=_swiglu_gradient,
        layouts=(Layout(("S(0)", "S(0)"), "S(0)"), Layout(("S(2)", "S(2)"), "S(2)")),
        dtypes=BOTH,
        gradient_dtypes=BOTH,
    ),
]
