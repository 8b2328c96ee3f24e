"""Linear layers of butterfly factors: ButterflyLinear, one of each size, and KaleidoscopeLinear,
with all sizes down and up again."""

from __future__ import annotations

import math
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import check_positive, register_linear
from monarch_flow.layers.structured import InitFunction, StructuredLinear, new_parameter

PERMUTATIONS = ("none", "bit_reversal", "mirrored_bit_reversal")


def input_order(permutation: str, points: int) -> np.ndarray:
    """Which input stands in which place, (points,), a power of two: itself; the one whose binary
    digits are reversed; or that of the even inputs followed by the odd ones backwards, which makes
    a DFT a DCT (Makhoul 1980). UserError for another name."""
    if permutation not in PERMUTATIONS:
        known = ", ".join(PERMUTATIONS)
        raise UserError(f"permutation {permutation!r} of a butterfly is none of {known}")
    order = np.arange(points)
    if permutation == "none":
        return order
    reversed_bits = order.reshape((2,) * (points.bit_length() - 1)).transpose().ravel()
    mirrored = np.concatenate([order[::2], order[::-2]])
    return reversed_bits if permutation == "bit_reversal" else mirrored[reversed_bits]


@register_linear("butterfly")
class ButterflyLinear(StructuredLinear):
    """y = B P x + bias: butterfly factors after a fixed permutation (Dao et al. 2019, "Learning
    Fast Algorithms for Linear Transforms Using Butterfly Factorizations", section 3).

    The factor of blocks of 2h mixes the values j and h + j of each by a 2 x 2 matrix of its own; N
    values have log2(N) factors, 2h from 2 to N, and 2 N log2(N) weights. N is `expansion` max(n,
    m), a power of two: the input is padded, and the output cropped, as S E S^T in Dao et al. 2020
    ("Kaleidoscope", section 2). With `complex_pairs` the factors are complex, and the padded input
    is N / 2 real parts and then N / 2 imaginary ones: complex vectors are given as such, and with
    twice the expansion a real one gives the real part of a complex product.

    The factors start as N(0, 1/2), complex ones with N(0, 1/4) in each part, which keeps the
    variance (Dao et al. 2019); the bias as U(-1/sqrt(m), 1/sqrt(m)). A model's own rule for dense
    layers does not apply. Raises UserError where N is not a power of two, or an option is wrong.

    Attributes:
        factors: parameter (passes, log2 P, parts, 2, 2, P / 2) of P real or complex values: by size
            of blocks from 2 up; real and imaginary part; rows and columns of the 2 x 2 matrices;
            and these, block by block.
        grows: of each pass, whether blocks grow from 2, or shrink to it.
    """

    grows: tuple[bool, ...] = (True,)
    # What a config has, beside sizes and bias.
    options: tuple[str, ...] = ("permutation", "expansion", "complex_pairs")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        permutation: str = "none",
        expansion: int = 1,
        complex_pairs: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        size = check_positive("expansion", expansion) * max(in_features, out_features)
        self.parts = 2 if complex_pairs else 1
        self.points = size // self.parts
        if size & (size - 1) or self.points < 2:
            raise UserError(
                f"butterfly factors are for a power of two of values, at least {2 * self.parts}: "
                f"{in_features} -> {out_features} with expansion {expansion} has {size}; choose "
                "such widths, or another layer there"
            )
        self.in_features_extended = self.out_features_extended = size
        order = input_order(permutation, self.points)
        self.permutation, self.expansion = permutation, expansion
        self.complex_pairs = complex_pairs
        shape = (len(self.grows), self.points.bit_length() - 1, self.parts, 2, 2, self.points // 2)
        self.factors = new_parameter(shape, device, dtype)
        # It follows from the option, so no checkpoint needs it.
        places = flow.tensor(order, device=self.factors.device)
        self.register_buffer("places", places, persistent=False)
        self.reset_parameters()

    @property
    def saving(self) -> float:
        return self.factors.numel() / (self.in_features * self.out_features)

    def macs_per_row(self) -> int:
        """Real ones: a complex product is four, of two stored numbers."""
        return self.parts * math.prod(self.factors.shape)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factors, 0.0, math.sqrt(0.5 / self.parts))
        self.reset_bias()

    def reset_dense_init(
        self, init_function: InitFunction, bias_init_function: InitFunction | None = None
    ) -> None:
        """Does nothing: a rule for dense matrices does not fit a product of many."""

    def structured_matmul(self, x: flow.Tensor) -> flow.Tensor:
        lead, parts, points = tuple(x.shape[:-1]), self.parts, self.points
        rows = math.prod(lead)
        # Rows come last, so that all that moves between factors are whole runs of them.
        x = x.reshape(rows, parts, points).permute(2, 1, 0)
        if self.permutation != "none":
            x = flow.index_select(x, 0, self.places)
        matrices = self._matrices()
        levels = range(matrices.shape[1])
        for number, grows in enumerate(self.grows):
            for level in levels if grows else reversed(levels):
                # One product for each 2 x 2 matrix: (2 parts, 2 parts) by (2 parts, rows).
                half = 2**level
                blocks = points // (2 * half)
                x = x.reshape(blocks, 2, half, parts, rows).permute(0, 2, 1, 3, 4)
                x = flow.bmm(matrices[number, level], x.reshape(points // 2, 2 * parts, rows))
                x = x.reshape(blocks, half, 2, parts, rows).permute(0, 2, 1, 3, 4)
        return x.reshape(points, parts, rows).permute(2, 1, 0).reshape(*lead, parts * points)

    def _matrices(self) -> flow.Tensor:
        """The 2 x 2 matrices as real ones, (passes, log2 P, P / 2, 2 parts, 2 parts)."""
        factors = self.factors.permute(0, 1, 5, 3, 4, 2)
        if self.parts == 1:
            return factors.squeeze(5)
        real, imaginary = factors[..., 0], factors[..., 1]
        # Real and imaginary parts of what comes out, each of those of what goes in.
        given = flow.stack([real, -imaginary], dim=-1), flow.stack([imaginary, real], dim=-1)
        return flow.stack(given, dim=-3).reshape(*real.shape[:3], 4, 4)

    def extra_repr(self) -> str:
        options = "".join(f", {name}={getattr(self, name)}" for name in self.options)
        return super().extra_repr() + options


@register_linear("kaleidoscope")
class KaleidoscopeLinear(ButterflyLinear):
    """y = (B B*)^width x + bias: each B the factors of a ButterflyLinear, each B* the conjugate
    transpose of others (Dao et al. 2020, "Kaleidoscope: An Efficient, Learnable Representation For
    All Structured Linear Maps", section 2).

    It has 4 N log2(N) width weights. `factors` has those of B* as they are applied, before those of
    B. All else is as in ButterflyLinear.
    """

    options = ("width", "expansion", "complex_pairs")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        width: int = 1,
        expansion: int = 1,
        complex_pairs: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.grows = (False, True) * check_positive("width", width)
        size, place = (in_features, out_features), {"device": device, "dtype": dtype}
        super().__init__(*size, bias, "none", expansion, complex_pairs, **place)
        self.width = width
