"""Fast transforms as butterfly and kaleidoscope layers, exactly: closed forms, computed in float64.

    layer = dft(64)        # (..., 128) to (..., 128): 64 real parts, then 64 imaginary ones

A DFT of n = 2^L values is F = B P with the bit reversal P, and B the butterfly factors of blocks 2h
whose 2 x 2 matrices are [[1, w], [1, -w]], w = exp(-pi i j / h) (Cooley and Tukey 1965). F is
symmetric, so F = P B^T too, and diagonal matrices on either side of B go into its first or last
factor. All else here follows from that, but for permutations, which are switches of 2 x 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.butterfly import ButterflyLinear, KaleidoscopeLinear, input_order
from monarch_flow.layers.structured import fill

_REVERSED = "bit_reversal"
_MIRRORED = "mirrored_bit_reversal"
_SWITCH = np.eye(2)[::-1]


def dft(points: int, dtype: Any = None) -> ButterflyLinear:
    """sum over m of x_m exp(-2 pi i k m / n), as numpy.fft.fft: (..., 2 n) to (..., 2 n), real
    parts first. UserError, as of all here, where n is not a power of two, at least 2."""
    return _pairs(_dft_factors(points), dtype)


def inverse_dft(points: int, dtype: Any = None) -> ButterflyLinear:
    """The inverse of `dft`, as numpy.fft.ifft."""
    return _pairs(_dft_factors(points).conj() / 2, dtype)


def walsh_hadamard(points: int, dtype: Any = None) -> ButterflyLinear:
    """Products with the matrix (-1)^(number of ones in k and m) (Sylvester's order): (..., n) to
    (..., n)."""
    factors = np.broadcast_to(_columns([[1.0, 1.0], [1.0, -1.0]]), _shape(points))
    return _filled(ButterflyLinear(points, points, bias=False, dtype=dtype), factors[None])


def dct(points: int, dtype: Any = None) -> ButterflyLinear:
    """2 sum over m of x_m cos(pi k (2 m + 1) / 2 n), scipy's DCT-II: (..., n) to (..., n).

    It is the real part of the DFT of the even inputs followed by the odd ones backwards, times 2
    exp(-pi i k / 2 n) (Makhoul 1980).
    """
    factors = _dft_factors(points)
    _scale_rows(factors, 2 * np.exp(-0.5j * np.pi * np.arange(points) / points))
    return _real_part(factors, dtype)


def dst(points: int, dtype: Any = None) -> ButterflyLinear:
    """2 sum over m of x_m sin(pi (k + 1) (2 m + 1) / 2 n), scipy's DST-II: (..., n) to (..., n).

    It is the DCT-II of (-1)^m x_m from its last value to its first. The DFT's last rows first are
    its conjugate after a factor exp(2 pi i m / n) of column m.
    """
    factors, index = _dft_factors(points).conj(), np.arange(points)
    signs = np.where(index < points // 2, 1, -1) * np.exp(2j * np.pi * index / points)
    _scale_columns(factors, signs[input_order(_REVERSED, points)])
    _scale_rows(factors, 2 * np.exp(-0.5j * np.pi * (points - 1 - index) / points))
    return _real_part(factors, dtype)


def circulant(column: np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """The circular convolution with `column` (n,), real: (..., n) to (..., n).

    F^-1 D F with D = diag(F column) is conj(B) P (D / n) P B^T: one B B* (Dao et al. 2020).
    """
    return _convolution(column, len(column), dtype)


def toeplitz(column: np.ndarray, row: np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """The Toeplitz matrix with this first column and row, (n,) each, real, as scipy's: (..., n) to
    (..., n). With zeros in the row's place it is the causal convolution. It is the corner of a
    circulant matrix of 2 n: one B B* with twice the expansion."""
    around = np.concatenate([column, [0.0], row[:0:-1]])
    return _convolution(around, len(column), dtype)


def permutation(order: Sequence[int] | np.ndarray, dtype: Any = None) -> KaleidoscopeLinear:
    """y_k = x_order[k]: (..., n) to (..., n); one real B B* holds every permutation, as a network
    of switches (Benes 1964). UserError where `order` is not a permutation."""
    places = np.asarray(order)
    _shape(len(places))
    if not np.array_equal(np.sort(places), np.arange(len(places))):
        raise UserError(f"an order of {len(places)} places must name each of them once")
    layer = KaleidoscopeLinear(len(places), len(places), bias=False, dtype=dtype)
    first, last = _switches(places)
    switched = np.stack([np.stack(first[::-1]), np.stack(last)])[:, :, None, None]
    return _filled(layer, np.where(switched, _columns(_SWITCH), _columns(np.eye(2))))


def as_kaleidoscope(butterfly: ButterflyLinear) -> KaleidoscopeLinear:
    """The same matrix, without its bias, in (B B*)^2: the permutation, then B times an identity."""
    own = butterfly.factors.numpy()
    order = input_order(butterfly.permutation, butterfly.points)
    factors = np.zeros((4, *own.shape[1:]), own.dtype)
    factors[:2, :, :1] = permutation(order, butterfly.factors.dtype).factors.numpy()
    factors[2, :, 0] = _columns(np.eye(2))
    factors[3] = own[0]
    size = butterfly.in_features, butterfly.out_features
    options = False, 2, butterfly.expansion, butterfly.parts == 2
    layer = KaleidoscopeLinear(*size, *options, dtype=butterfly.factors.dtype)
    fill(layer.factors, factors)
    return layer


def _shape(points: int) -> tuple[int, int, int, int]:
    """Of the factors of one pass; UserError for another number than a power of two."""
    if points < 2 or points & (points - 1):
        raise UserError(f"a transform of {points} values: it takes a power of two, at least 2")
    return points.bit_length() - 1, 2, 2, points // 2


def _columns(matrix: Any) -> np.ndarray:
    """A 2 x 2 matrix for each place: (2, 2, 1)."""
    return np.asarray(matrix)[..., None]


def _dft_factors(points: int) -> np.ndarray:
    """Complex factors (L, 2, 2, n / 2) of B in F = B P."""
    factors = np.ones(_shape(points), complex)
    for level, factor in enumerate(factors):
        half = 2**level
        roots = np.exp(-1j * np.pi * np.arange(half) / half)
        factor[:, 1] = np.tile(roots, points // (2 * half)) * np.array([[1], [-1]])
    return factors


def _scale_columns(factors: np.ndarray, values: np.ndarray) -> None:
    """B diag(values), by the factor of the smallest blocks."""
    factors[0] *= values.reshape(-1, 2).T[None]


def _scale_rows(factors: np.ndarray, values: np.ndarray) -> None:
    """diag(values) B, by the factor of the one large block."""
    factors[-1] *= values.reshape(2, 1, -1)


def _convolution(around: np.ndarray, features: int, dtype: Any) -> KaleidoscopeLinear:
    points = len(around)
    first, last = _dft_factors(points).swapaxes(1, 2), _dft_factors(points).conj()
    spectrum = np.fft.fft(around) / points
    _scale_columns(last, spectrum[input_order(_REVERSED, points)])
    size = features, features
    layer = KaleidoscopeLinear(*size, False, 1, 2 * points // features, True, dtype=dtype)
    return _filled(layer, np.stack([first, last]))


def _pairs(factors: np.ndarray, dtype: Any) -> ButterflyLinear:
    size = 4 * factors.shape[-1]
    layer = ButterflyLinear(size, size, False, _REVERSED, 1, True, dtype=dtype)
    return _filled(layer, factors[None])


def _real_part(factors: np.ndarray, dtype: Any) -> ButterflyLinear:
    size = 2 * factors.shape[-1]
    layer = ButterflyLinear(size, size, False, _MIRRORED, 2, True, dtype=dtype)
    return _filled(layer, factors[None])


def _filled(layer: Any, factors: np.ndarray) -> Any:
    """Give a layer these factors (passes, L, 2, 2, P / 2)."""
    parts = [factors.real, factors.imag] if layer.parts == 2 else [factors]
    fill(layer.factors, np.stack(parts, axis=2))
    return layer


def _switches(order: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Which switches of a Benes network are crossed: of the first half, large blocks first, and of
    the second, small ones first; (n / 2,) each. Each pair of inputs, and of outputs, j and n / 2 +
    j, sends one to the upper half of the network inside and one to the lower."""
    size = len(order)
    if size == 1:
        return [], []
    half = size // 2
    source_of, lower = np.argsort(order), np.full(size, -1)
    for start in range(half):
        output = start
        while lower[output] < 0:
            lower[output] = 0
            # What shares a switch of the input with it must take the other half.
            other = source_of[(order[output] + half) % size]
            lower[other] = 1
            output = (other + half) % size
    crossed_out = lower[:half] == 1
    upper_outputs = np.where(crossed_out, np.arange(half) + half, np.arange(half))
    inside = [order[(upper_outputs + shift) % size] for shift in (0, half)]
    crossed_in = np.zeros(half, bool)
    crossed_in[inside[0] % half] = inside[0] >= half
    nested = [_switches(places % half) for places in inside]
    first, last = (
        [np.concatenate(blocks) for blocks in zip(*halves, strict=True)]
        for halves in zip(*nested, strict=True)
    )
    return [crossed_in, *first], [*last, crossed_out]
