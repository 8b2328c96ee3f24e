"""Linear layers of butterfly factors: ButterflyLinear, one product of all sizes of them, and
KaleidoscopeLinear, several, up and down in turns.

A factor of block size 2h mixes the values j and h + j of each block of 2h by a 2 x 2 matrix of its
own (Dao et al. 2019, "Learning Fast Algorithms for Linear Transforms Using Butterfly
Factorizations", section 3); N values have log2(N) sizes, 2 to N.
"""

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
    bits = points.bit_length() - 1
    reversed_bits = order.reshape((2,) * bits).transpose().ravel()
    if permutation == "bit_reversal":
        return reversed_bits
    return np.concatenate([order[::2], order[::-2]])[reversed_bits]


class FactorProduct(StructuredLinear):
    """y = crop(F ... F x, padded with zeros) + bias, for factors F of N values.

    N is `expansion` max(n, m), the S E S^T of Dao et al. 2020 ("Kaleidoscope", section 2), and a
    power of two. With `complex_pairs` the factors are complex, and the padded input is N / 2 real
    parts and then N / 2 imaginary ones. So complex vectors are given as such, and with twice the
    expansion a real vector gives the real part of a complex product.

    The factors start as N(0, 1/2), complex ones with N(0, 1/4) in each part, which keeps the
    variance of what they multiply (Dao et al. 2019, section 3.2); the bias as U(-1/sqrt(m),
    1/sqrt(m)). A model's own rule for dense layers does not apply.

    Attributes:
        factors: parameter (passes, log2 P, parts, 2, 2, P / 2) of P complex or real values: by size
            of blocks from 2 up; real and imaginary part; rows and columns of the 2 x 2 matrices;
            and these, block by block.

    Raises:
        UserError: N is not a power of two (and P at least 2), or an option is wrong.
    """

    # Of each pass, whether the sizes of blocks grow from 2 or shrink to it; by what is built.
    grows: tuple[bool, ...]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        permutation: str,
        expansion: int,
        complex_pairs: bool,
        device: Any,
        dtype: Any,
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
        shape = (len(self.grows), self.points.bit_length() - 1, self.parts, 2, 2, self.points // 2)
        self.factors = new_parameter(shape, device, dtype)
        # It follows from the option, so no checkpoint needs it.
        places = flow.tensor(order, device=self.factors.device)
        self.register_buffer("places", places, persistent=False)
        self.reset_parameters()

    @property
    def saving(self) -> float:
        return math.prod(self.factors.shape) / (self.in_features * self.out_features)

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
        x = x.reshape(rows * parts, points)
        if self.permutation != "none":
            x = flow.index_select(x, 1, self.places)
        matrices = self._matrices()
        levels = range(matrices.shape[1])
        for number, grows in enumerate(self.grows):
            for level in levels if grows else reversed(levels):
                # One product for each 2 x 2 matrix: (P / 2, rows, 2 parts) by (2 parts, 2 parts).
                half = 2**level
                blocks = points // (2 * half)
                x = x.reshape(rows, parts, blocks, 2, half).permute(2, 4, 0, 1, 3)
                x = flow.bmm(x.reshape(blocks * half, rows, 2 * parts), matrices[number, level])
                x = x.reshape(blocks, half, rows, parts, 2).permute(2, 3, 0, 4, 1)
        return x.reshape(*lead, parts * points)

    def _matrices(self) -> flow.Tensor:
        """The transposed 2 x 2 matrices as real ones, (passes, log2 P, P / 2, 2 parts, 2 parts)."""
        factors = self.factors.permute(0, 1, 5, 2, 4, 3)
        if self.parts == 1:
            return factors.squeeze(3)
        real, imaginary = factors[:, :, :, 0], factors[:, :, :, 1]
        # What a real input part gives to both parts of the output, and what an imaginary one does.
        given = flow.cat([real, imaginary], dim=-1), flow.cat([-imaginary, real], dim=-1)
        return flow.cat(given, dim=-2)

    def options(self) -> dict[str, Any]:
        """What the constructor was given, but for sizes and bias."""
        return {"expansion": self.expansion, "complex_pairs": self.parts == 2}

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options().items())
        return super().extra_repr() + options


@register_linear("butterfly")
class ButterflyLinear(FactorProduct):
    """y = B P x + bias: a butterfly matrix, its blocks growing from 2 to all values, after a fixed
    permutation (Dao et al. 2019, section 3.2, where P is learned among such).

    It has 2 N log2(N) weights. Without a permutation it is the B of the Kaleidoscope hierarchy. See
    `FactorProduct` for N, `expansion`, `complex_pairs` and errors.
    """

    grows = (True,)

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
        options = (permutation, expansion, complex_pairs)
        super().__init__(in_features, out_features, bias, *options, device, dtype)

    def options(self) -> dict[str, Any]:
        return {"permutation": self.permutation, **super().options()}


@register_linear("kaleidoscope")
class KaleidoscopeLinear(FactorProduct):
    """y = (B B*)^width x + bias, each B a butterfly matrix of its own, each B* the conjugate
    transpose of another (Dao et al. 2020, "Kaleidoscope: An Efficient, Learnable Representation For
    All Structured Linear Maps", section 2).

    It has 4 N log2(N) width weights. `factors` holds those of B* as they are applied, before those
    of B. See `FactorProduct` for N, `expansion`, `complex_pairs` and errors.
    """

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
        options = ("none", expansion, complex_pairs)
        super().__init__(in_features, out_features, bias, *options, device, dtype)

    def options(self) -> dict[str, Any]:
        return {"width": len(self.grows) // 2, **super().options()}
