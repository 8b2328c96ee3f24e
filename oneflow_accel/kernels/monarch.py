"""The operation "monarch_multiply": a product with a Monarch matrix, given by its two factors.

Formulas: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate Training"
(2022), section 3.1, for rectangular factors.
"""

from __future__ import annotations

import math

from oneflow_accel.kernels.operators import Operator, needs_gradient, with_gradient
from oneflow_accel.kernels.registry import cpu_implementation, on_cards, register_operation

import oneflow as flow

_INPUTS = ("x", "blkdiag1", "blkdiag2", "bias")
_TYPES = {"out_features": "int64"}

_forward = Operator("oneflow_accel_monarch", _INPUTS, ("y",), _TYPES, optional=("bias",))
# What the gradient needs besides the inputs: x after the first factor, permuted.
_forward_keeping = Operator(
    "oneflow_accel_monarch_keeping", _INPUTS, ("y", "middle"), _TYPES, optional=("bias",)
)
_backward = Operator(
    "oneflow_accel_monarch_grad",
    ("y_grad", "x", "blkdiag1", "blkdiag2", "middle"),
    ("x_grad", "blkdiag1_grad", "blkdiag2_grad", "bias_grad"),
)


def monarch_multiply(
    x: flow.Tensor,
    blkdiag1: flow.Tensor,
    blkdiag2: flow.Tensor,
    bias: flow.Tensor | None = None,
    *,
    out_features: int | None = None,
) -> flow.Tensor:
    """x M^T (+ bias) for the Monarch matrix M of two block-diagonal factors.

    A row of x is cut into k blocks of p, and block i becomes u[i] = blkdiag1[i] x[i]. The k q
    values of u, read as an (r, l) grid and transposed, are l blocks of r: v[j, i] = u[i l + j].
    Block j becomes z[j] = blkdiag2[j] v[j], and the result is y[i l + j] = z[j, i].

    A row of x may be shorter than k p, as if zeros followed, and y is cut off at `out_features`: a
    layer whose sizes its blocks do not divide needs no copy of its activations for it. With a bias,
    given here rather than added afterwards, neither needs a layer another pass over y.

    x is (..., n) with n <= k p, blkdiag1 (k, q, p), blkdiag2 (l, s, r) with l r = k q, bias
    (out_features,), all of one dtype; the result is (..., out_features). Global rows may be split
    along the axes in front, with factors that are broadcast; the factors' gradients are partial
    sums then. ValueError if the shapes do not fit.
    """
    shape, first, second = tuple(x.shape), tuple(blkdiag1.shape), tuple(blkdiag2.shape)
    width = out_features
    if len(second) == 3 and out_features is None:
        width = second[0] * second[1]
    if len(first) != 3 or len(second) != 3 or 0 in first + second:
        raise ValueError(f"blkdiag1 {first} and blkdiag2 {second} are not (k, q, p) and (l, s, r)")
    if first[0] * first[1] != second[0] * second[2]:
        raise ValueError(
            f"blkdiag1 {first} gives {first[0]} x {first[1]} values and blkdiag2 {second} takes "
            f"{second[0]} x {second[2]}"
        )
    if len(shape) == 0 or not 0 < shape[-1] <= first[0] * first[2]:
        raise ValueError(
            f"rows of x {shape} are not 1 to {first[0] * first[2]} long, as blkdiag1 {first} takes "
            "them"
        )
    if width is None or not 0 < width <= second[0] * second[1]:
        raise ValueError(
            f"out_features {width} is not 1 to {second[0] * second[1]}, as blkdiag2 {second} gives"
        )
    if bias is not None and tuple(bias.shape) != (width,):
        raise ValueError(f"bias {tuple(bias.shape)} is not ({width},)")
    return _operation(x, blkdiag1, blkdiag2, bias, out_features=width)


def _reference(
    x: flow.Tensor,
    blkdiag1: flow.Tensor,
    blkdiag2: flow.Tensor,
    bias: flow.Tensor | None = None,
    *,
    out_features: int,
) -> flow.Tensor:
    blocks1, _, width1 = blkdiag1.shape
    blocks2, outer, width2 = blkdiag2.shape
    lead = tuple(x.shape[:-1])
    count = math.prod(lead)
    if count == 0:
        # OneFlow's own kernel for products of float64 ends the process without rows.
        nothing = (x.sum() + blkdiag1.sum() + blkdiag2.sum()) * 0
        return _with_bias(x[..., :1].expand(*lead, out_features) + nothing, bias)
    rows = x.reshape(count, x.shape[-1])
    missing = blocks1 * width1 - x.shape[-1]
    if missing:
        rows = flow.nn.functional.pad(rows, (0, missing))
    multiply = flow._C.batch_matmul
    rows = rows.reshape(count, blocks1, width1).permute(1, 0, 2)
    # With the rows last, the grid of (r, l) is another shape of (k, q), and its transpose moves
    # whole runs of rows: OneFlow copies before and between the products, and once after.
    middle = multiply(blkdiag1, rows, transpose_b=True)
    middle = middle.reshape(width2, blocks2, count).permute(1, 0, 2)
    out = multiply(middle, blkdiag2, transpose_a=True, transpose_b=True).permute(1, 2, 0)
    out = out.reshape(*lead, outer * blocks2)
    if out_features < outer * blocks2:
        out = out.narrow(-1, 0, out_features)
    return _with_bias(out, bias)


def _with_bias(y: flow.Tensor, bias: flow.Tensor | None) -> flow.Tensor:
    return y if bias is None else y + bias


_operation = register_operation(
    "monarch_multiply",
    reference=_reference,
    doc="x M^T (+ bias) for the Monarch matrix M of the factors blkdiag1 (k, q, p), "
    "blkdiag2 (l, s, r): x (..., k p) to (..., l s), with l r = k q",
    lacks=on_cards(
        "no such operator there: two batched products, and a copy before, between and after them"
    ),
)


_keeping = with_gradient("keeping", _forward_keeping, _backward, autocast=flow.bfloat16)


@cpu_implementation("monarch_multiply", _forward)
def tiled(*tensors: flow.Tensor | None, out_features: int) -> flow.Tensor:
    """Both factors of a tile of rows at a time, which stays in a core's cache between them."""
    if needs_gradient(*tensors):
        return _keeping(*tensors, out_features=out_features)
    return _forward(*tensors, out_features=out_features)[0]
