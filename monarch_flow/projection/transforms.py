"""Fast transforms as butterfly and kaleidoscope layers, exactly: closed forms, made in float64.

    layer = dft(64)        # (..., 128) to (..., 128): 64 real parts, then 64 imaginary ones

A DFT of n = 2^L values is F = B P with the bit reversal P, and B the factors of blocks 2h with
matrices [[1, w], [1, -w]], w = exp(-pi i j / h) (Cooley and Tukey 1965). F is symmetric, so F = P
B^T, too; a diagonal matrix on either side of B goes into its first or last factor. All else here
follows from that, but for permutations, which are switches of 2 x 2. Each function raises UserError
where n is not a power of two, at least 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from monarch_flow.layers.butterfly import ButterflyLinear, KaleidoscopeLinear, input_order
from monarch_flow.layers.structured import fill

# 2 x 2 matrices, to stand in all places of a factor.
_STRAIGHT, _CROSSED = np.eye(2)[..., None], np.eye(2)[::-1, :, None]


def dft(points: int, dtype: Any = None) -> ButterflyLinear:
    """sum over m of x_m exp(-2 pi i k m / n), as numpy.fft.fft: (..., 2 n) to (..., 2 n), real
    parts first."""
    size = 2 * points, 2 * points, False, "bit_reversal"
    return _filled(_dft_factors(points), ButterflyLinear, *size, complex_pairs=True, dtype=dtype)


def inverse_dft(points: int, dtype: Any = None) -> ButterflyLinear:
    """The inverse of `dft`, as numpy.fft.ifft."""
    size, factors = (2 * points, 2 * points, False, "bit_reversal"), _dft_factors(points).conj() / 2
    return _filled(factors, ButterflyLinear, *size, complex_pairs=True, dtype=dtype)


def walsh_hadamard(points: int, dtype: Any = None) -> ButterflyLinear:
    """(-1)^(number of ones in k and m), Sylvester's order: (..., n) to (..., n)."""
    factors = np.broadcast_to([[[1.0], [1.0]], [[1.0], [-1.0]]], _shape(points))
    return _filled(factors, ButterflyLinear, points, points, False, dtype=dtype)


def dct(points: int, dtype: Any = None) -> ButterflyLinear:
    """2 sum over m of x_m cos(pi k (2 m + 1) / 2 n), scipy's DCT-II: (..., n) to (..., n). It is
    the real part of 2 exp(-pi i k / 2 n) times the DFT of the even inputs followed by the odd ones
    backwards (Makhoul 1980)."""
    return _real_part(_dft_factors(points), np.ones(points), np.arange(points), dtype)


def dst(points: int, dtype: Any = None) -> ButterflyLinear:
    """2 sum over m of x_m sin(pi (k + 1) (2 m + 1) / 2 n), scipy's DST-II: (..., n) to (..., n). It
    is the DCT-II of (-1)^m x_m from its last value to its first: with the conjugate factors the DFT
    is backwards, after exp(2 pi i m / n) in column m."""
    factors, index = _dft_factors(points).conj(), np.arange(points)
    signs = np.where(index < points // 2, 1, -1) * np.exp(2j * np.pi * index / points)
    return _real_part(factors, signs, points - 1 - index, dtype)


def circulant(column: np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """The circular convolution with `column` (n,), real: (..., n) to (..., n). F^-1 D F with D =
    diag(F column) is conj(B) P (D / n) P B^T: one B B* (Dao et al. 2020)."""
    return _convolution(column, len(column), dtype)


def toeplitz(column: np.ndarray, row: np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """The Toeplitz matrix of this first column and row, (n,) each, real, as scipy's: (..., n) to
    (..., n); the causal convolution where the row is zero. It is the corner of a circulant matrix
    of 2 n: one B B* with twice the expansion."""
    return _convolution(np.concatenate([column, [0.0], row[:0:-1]]), len(column), dtype)


def permutation(order: Sequence[int] | np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """y_k = x_order[k]: (..., n) to (..., n). One real B B* is any permutation, as a network of
    switches (Benes 1964). UserError where `order` is not one."""
    places = np.asarray(order)
    _shape(len(places))
    if not np.array_equal(np.sort(places), np.arange(len(places))):
        raise UserError(f"an order of {len(places)} places must name each of them once")
    first, last = _switches(places)
    crossed = np.stack([np.stack(first[::-1]), np.stack(last)])[:, :, None, None]
    size = len(places), len(places), False
    return _filled(np.where(crossed, _CROSSED, _STRAIGHT), KaleidoscopeLinear, *size, dtype=dtype)


def as_kaleidoscope(butterfly: ButterflyLinear) -> KaleidoscopeLinear:
    """The same matrix, without its bias, in B B*; where it has a permutation, in (B B*)^2."""
    own, dtype = butterfly.factors.numpy(), butterfly.factors.dtype
    passes = np.zeros((4, *own.shape[1:]))
    passes[2, :, 0], passes[3] = _STRAIGHT, own[0]
    if butterfly.permutation == "none":
        passes = passes[2:]
    else:
        order = input_order(butterfly.permutation, butterfly.points)
        passes[:2, :, :1] = permutation(order, flow.float64).factors.numpy()
    size, width = (butterfly.in_features, butterfly.out_features, False), len(passes) // 2
    more = butterfly.expansion, butterfly.complex_pairs
    layer = KaleidoscopeLinear(*size, width, *more, dtype=dtype)
    fill(layer.factors, passes)
    return layer


def _shape(points: int) -> tuple[int, int, int, int]:
    """Of the factors of one pass."""
    if points < 2 or points & (points - 1):
        raise UserError(f"a transform of {points} values: it takes a power of two, at least 2")
    return points.bit_length() - 1, 2, 2, points // 2


def _dft_factors(points: int) -> np.ndarray:
    """The complex factors (L, 2, 2, n / 2) of B in F = B P."""
    factors = np.ones(_shape(points), complex)
    for level, factor in enumerate(factors):
        half = 2**level
        roots = np.exp(-1j * np.pi * np.arange(half) / half)
        factor[:, 1] = np.tile(roots, points // (2 * half)) * np.array([[1], [-1]])
    return factors


def _scale_columns(factors: np.ndarray, values: np.ndarray) -> None:
    """Make B P, with the bit reversal, B P diag(values), by the factor of the smallest blocks."""
    factors[0] *= values[input_order("bit_reversal", len(values))].reshape(-1, 2).T


def _real_part(
    factors: np.ndarray, columns: np.ndarray, turns: np.ndarray, dtype: Any
) -> ButterflyLinear:
    """The real part of 2 exp(-pi i turns / 2 n) B P diag(columns), of inputs in Makhoul's order."""
    points = len(columns)
    _scale_columns(factors, columns)
    factors[-1] *= 2 * np.exp(-0.5j * np.pi * turns / points).reshape(2, 1, -1)
    options = points, points, False, "mirrored_bit_reversal", 2, True
    return _filled(factors, ButterflyLinear, *options, dtype=dtype)


def _convolution(around: np.ndarray, features: int, dtype: Any) -> KaleidoscopeLinear:
    points = len(around)
    first, last = _dft_factors(points).swapaxes(1, 2), _dft_factors(points).conj()
    _scale_columns(last, np.fft.fft(around) / points)
    options = features, features, False, 1, 2 * points // features, True
    return _filled(np.stack([first, last]), KaleidoscopeLinear, *options, dtype=dtype)


def _filled(factors: np.ndarray, kind: Any, *options: Any, **more: Any) -> Any:
    """A layer with these factors ([passes,] L, 2, 2, P / 2)."""
    layer = kind(*options, **more)
    parts = [factors.real, factors.imag] if layer.complex_pairs else [factors]
    fill(layer.factors, np.stack(parts, axis=-4).reshape(layer.factors.shape))
    return layer


def _switches(order: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Which switches of a Benes network are crossed: of the first half, large blocks first, and of
    the second, small ones first; (n / 2,) each. Each pair of inputs, and of outputs, j and n / 2 +
    j, sends one to the upper half of the network inside and one to the lower."""
    size, half = len(order), len(order) // 2
    if size == 1:
        return [], []
    source_of, lower = np.argsort(order), np.full(size, -1)
    for output in range(half):
        while lower[output] < 0:
            lower[output] = 0
            # What shares a switch of the input with it must take the other half.
            other = source_of[(order[output] + half) % size]
            lower[other] = 1
            output = (other + half) % size
    crossed_out = lower[:half] == 1
    upper = order[np.arange(half) + half * crossed_out]
    below = order[np.arange(half) + half * ~crossed_out]
    crossed_in = np.zeros(half, bool)
    crossed_in[upper % half] = upper >= half
    inside = _switches(upper % half), _switches(below % half)
    first, last = (
        [np.concatenate(blocks) for blocks in zip(*halves, strict=True)]
        for halves in zip(*inside, strict=True)
    )
    return [crossed_in, *first], [*last, crossed_out]
