"""Attention by positive random features, with the value that comes along."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.kernels.attention import performer_attention

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Case, Layout, Record, case

# So that the value has a gradient of its own.
VALUE = 0.5


def _features(features: int, dim: int) -> np.ndarray:
    """w, in values that float32 has."""
    w = np.random.default_rng([features, dim]).standard_normal((features, dim), np.float32)
    return w.astype(np.float64)


def _dtype_of_w(kqv: flow.Tensor) -> flow.dtype:
    return flow.float32 if kqv.dtype == flow.bfloat16 else kqv.dtype


def _call(kqv: flow.Tensor, features: int, epsilon: float) -> flow.Tensor:
    w = flow.tensor(_features(features, kqv.shape[2] // 3), dtype=_dtype_of_w(kqv))
    if kqv.is_global:
        w = w.to_global(placement=kqv.placement, sbp=flow.sbp.broadcast)
    out, value = performer_attention(kqv, w, epsilon=epsilon)
    return out + VALUE * value


def _phi(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.exp(x @ w.T - 0.5 * (x**2).sum(axis=-1, keepdims=True)) / np.sqrt(len(w))


def _weights(key: np.ndarray, query: np.ndarray, w: np.ndarray, epsilon: float) -> np.ndarray:
    """What each query takes of each value, by the (time, time) matrix that kernels do without."""
    products = _phi(query, w) @ _phi(key, w).swapaxes(1, 2)
    return products / (products.sum(axis=-1, keepdims=True) + epsilon)


def _reference(kqv: np.ndarray, features: int, epsilon: float) -> np.ndarray:
    key, query, value = np.split(kqv, 3, axis=-1)
    w = _features(features, key.shape[-1])
    return _weights(key, query, w, epsilon) @ value + VALUE * value


def _gradient(dy: np.ndarray, kqv: np.ndarray, features: int, epsilon: float) -> tuple[np.ndarray]:
    key, query, value = np.split(kqv, 3, axis=-1)
    w = _features(features, key.shape[-1])
    phi_k, phi_q = _phi(key, w), _phi(query, w)
    products = phi_q @ phi_k.swapaxes(1, 2)
    total = products.sum(axis=-1, keepdims=True) + epsilon
    weights = products / total
    weights_grad = dy @ value.swapaxes(1, 2)
    products_grad = (weights_grad - (weights_grad * weights).sum(axis=-1, keepdims=True)) / total
    grads = [
        _through_phi(products_grad.swapaxes(1, 2) @ phi_q, phi_k, key, w),
        _through_phi(products_grad @ phi_k, phi_q, query, w),
        weights.swapaxes(1, 2) @ dy + VALUE * dy,
    ]
    return (np.concatenate(grads, axis=-1),)


def _through_phi(phi_grad: np.ndarray, phi: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    product = phi_grad * phi
    return product @ w - product.sum(axis=-1, keepdims=True) * x


def _small(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Values whose exponentials are far from 0."""
    return lambda generator: 0.4 * generator.standard_normal(shape)


def _case(name: str, batch: int, time: int, dim: int, features: int, epsilon: float = 1e-8) -> Case:
    return case(
        name, _small(batch, time, 3 * dim), reduced=time, features=features, epsilon=epsilon
    )


RECORDS = [
    Record(
        name="performer_attention",
        operators=("oneflow_accel_performer", "oneflow_accel_performer_grad"),
        call=_call,
        reference=_reference,
        gradient=_gradient,
        cases=[
            _case("one", 1, 1, 1, 1),
            _case("odd", 2, 7, 5, 3),
            _case("epsilon", 2, 7, 5, 3, epsilon=0.3),
            _case("more features than values", 3, 9, 4, 11),
            _case("ViTAE", 2, 70, 64, 32),
            # Above a tile of tokens, a chunk of them and a panel of values, by a little.
            _case("chunks", 2, 1030, 17, 33),
            _case("wide", 1, 66, 130, 65),
            _case("no batch", 0, 7, 5, 3),
            _case("global", 4, 6, 5, 2),
        ],
        layouts=[Layout(inputs=("B",), output="B"), Layout(inputs=("S(0)",), output="S(0)")],
        dtypes=("float32", "float64", "bfloat16"),
        gradient_dtypes=("float32", "float64", "bfloat16"),
    )
]
