"""The structured matrices nearest to a dense one, and the dense ones of structured, in numpy.

A Monarch matrix (Dao et al. 2022, section 3) is given by blkdiag1 (k, q, p) and blkdiag2 (l, s, r)
with l r = k q. Its input is cut into k blocks of p; slot t = kappa q + iota of the k q values in
the middle feeds block lambda = t mod l of the second factor; output row sigma l + lambda is row
sigma of that block. So the matrix falls apart into k l pieces of its own,

    T[kappa, lambda] = M[lambda::l, kappa p : (kappa + 1) p]        (s, p)
                     = sum over the slots t of kappa and lambda of
                       blkdiag2[lambda, :, t div l] blkdiag1[kappa, t mod q, :]^T

and every slot belongs to one piece. A piece with R slots is any matrix of rank at most R, and no
two pieces share a number: the nearest Monarch matrix is the truncated SVD of each piece (Eckart and
Young 1936; Dao et al. 2022, section 3.3). Where l does not divide q the pieces have unequal ranks,
ceil(q / l) or floor(q / l), which can be 0.

The numbers of block-diagonal and block-sparse layers are entries of the dense matrix: projecting
takes them out and densifying puts them back, both exactly and in any dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel.errors import UserError

import numpy as np

from monarch_flow.layers.monarch import monarch_shapes

Shape3 = tuple[int, int, int]


def project_to_monarch(weight: np.ndarray, nblocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors of a `MonarchLinear(n, m, nblocks)` whose dense matrix is nearest to `weight` (m, n).

    No factors of these shapes give a smaller Frobenius distance, for any m, n and nblocks. Padding
    does not change that: the rows and columns that the layer crops are a rectangle of each piece,
    and with zeros there the SVD of the padded piece is that of the cropped one. The factors are not
    unique (each singular value is split evenly between the two; signs and rotations are free), so
    compare dense matrices. A small distance between weights need not mean a small change of a
    network's output, which depends on its inputs.

    Returns:
        blkdiag1 and blkdiag2 in the dtype of `weight` (float16 and complex too), computed in
        float64. Exact up to rounding where `weight` is such a Monarch matrix. A slot with nothing
        to hold (`weight` of low rank) is zero in both factors: in training no gradient will ever
        move it.

    Raises:
        ValueError: `weight` is not a matrix of floats, or nblocks is below 1.
        UserError: `weight` holds NaN or infinity.
    """
    _check_matrix(weight)
    if nblocks < 1:
        raise ValueError(f"nblocks must be at least 1, got {nblocks}")
    out_features, in_features = weight.shape
    return project_to_factors(weight, *monarch_shapes(in_features, out_features, nblocks))


def project_to_factors(
    weight: np.ndarray, shape1: Shape3, shape2: Shape3
) -> tuple[np.ndarray, np.ndarray]:
    """The same for any shapes (k, q, p) and (l, s, r), l r = k q, with m <= l s and n <= k p. It
    raises as `project_to_monarch`, and ValueError where the shapes do not fit."""
    _check_matrix(weight)
    _check_shapes(shape1, shape2)
    if not np.isfinite(weight).all():
        raise UserError("the weight holds NaN or infinity; there is nothing to project")
    rank = -(-shape1[1] // shape2[0])
    pieces = split_pieces(weight, shape1, shape2)
    left, values, right = np.linalg.svd(pieces, full_matrices=False)
    kept = min(rank, values.shape[-1])
    root = np.sqrt(values[..., :kept])
    # Slots beyond the number of a piece's singular values stay zero.
    full_left = np.zeros((*pieces.shape[:-1], rank), pieces.dtype)
    full_right = np.zeros((*pieces.shape[:-2], rank, pieces.shape[-1]), pieces.dtype)
    full_left[..., :kept] = left[..., :kept] * root[..., None, :]
    full_right[..., :kept, :] = root[..., :, None] * right[..., :kept, :]
    blkdiag1, blkdiag2 = merge_factors(full_left, full_right, shape1, shape2)
    return blkdiag1.astype(weight.dtype), blkdiag2.astype(weight.dtype)


def monarch_to_dense(
    blkdiag1: np.ndarray,
    blkdiag2: np.ndarray,
    out_features: int | None = None,
    in_features: int | None = None,
) -> np.ndarray:
    """The dense matrix (m, n) of blkdiag1 (k, q, p) and blkdiag2 (l, s, r) with l r = k q.

    None as a size keeps all rows l s, or all columns k p. The result has the factors' dtype; sums
    are made in float64 and rounded once. Raises ValueError where the shapes do not fit.
    """
    left, right = split_factors(blkdiag1, blkdiag2)
    dense = merge_pieces(left @ right, out_features, in_features)
    return dense.astype(np.result_type(blkdiag1, blkdiag2))


def slot_table(blocks1: int, inner: int, blocks2: int) -> tuple[np.ndarray, np.ndarray]:
    """Which slots of the middle belong to which piece.

    Returns slot numbers t (k, l, R), R = ceil(q / l), ascending along the last axis, and whether
    each is used: pieces with fewer slots than R have their last one unused (its number is 0 then).
    """
    first = np.arange(blocks1)[:, None, None] * inner
    residue = np.arange(blocks2)[None, :, None]
    start = first + (residue - first) % blocks2
    slots = start + blocks2 * np.arange(-(-inner // blocks2))
    used = slots < first + inner
    return np.where(used, slots, 0), used


def split_factors(blkdiag1: np.ndarray, blkdiag2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors of each piece, T = left right, in float64; zeros where a slot is unused.

    Gradients and moments of a factor's shape can be split too. Returns left (k, l, s, R) from
    blkdiag2 and right (k, l, R, p) from blkdiag1.
    """
    _check_shapes(blkdiag1.shape, blkdiag2.shape)
    blocks1, inner, width = blkdiag1.shape
    blocks2, outer, _ = blkdiag2.shape
    slots, used = slot_table(blocks1, inner, blocks2)
    # Rows t of these two are the vectors on either side of slot t.
    rows1 = _wide(blkdiag1).reshape(blocks1 * inner, width)
    rows2 = _wide(blkdiag2).transpose(2, 0, 1).reshape(blocks1 * inner, outer)
    right = np.where(used[..., None], rows1[slots], 0.0)
    left = np.where(used[..., None], rows2[slots], 0.0)
    return left.swapaxes(-1, -2), right


def merge_factors(
    left: np.ndarray, right: np.ndarray, shape1: Shape3, shape2: Shape3
) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `split_factors`; values in unused slots are dropped."""
    blocks1, inner, width = shape1
    blocks2, outer, depth = shape2
    slots, used = slot_table(blocks1, inner, blocks2)
    rows1 = np.empty((blocks1 * inner, width), right.dtype)
    rows2 = np.empty((blocks1 * inner, outer), left.dtype)
    rows1[slots[used]] = right[used]
    rows2[slots[used]] = left.swapaxes(-1, -2)[used]
    return rows1.reshape(shape1), rows2.reshape(depth, blocks2, outer).transpose(1, 2, 0).copy()


def split_pieces(weight: np.ndarray, shape1: Shape3, shape2: Shape3) -> np.ndarray:
    """The float64 pieces (k, l, s, p) of a matrix (m, n), zero-padded; ValueError if too large."""
    blocks1, _, width = shape1
    blocks2, outer, _ = shape2
    rows, columns = outer * blocks2, blocks1 * width
    padded = _padded(_wide(weight), rows, columns)
    return padded.reshape(outer, blocks2, blocks1, width).transpose(2, 1, 0, 3)


def merge_pieces(
    pieces: np.ndarray, out_features: int | None = None, in_features: int | None = None
) -> np.ndarray:
    """The inverse of `split_pieces`, cropped to (m, n); ValueError if the pieces are too small."""
    blocks1, blocks2, outer, width = pieces.shape
    full = pieces.transpose(2, 1, 0, 3).reshape(outer * blocks2, blocks1 * width)
    rows = full.shape[0] if out_features is None else out_features
    columns = full.shape[1] if in_features is None else in_features
    return _cropped(full, rows, columns)


def _wide(array: np.ndarray) -> np.ndarray:
    """In float64, or complex128 where it is complex."""
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64, copy=False)


def _check_matrix(weight: np.ndarray) -> None:
    if weight.ndim != 2 or weight.dtype.kind not in "fc" or not weight.size:
        raise ValueError(
            f"expected a matrix of floats (out, in), got shape {weight.shape}, dtype {weight.dtype}"
        )


def _check_shapes(shape1: tuple[int, ...], shape2: tuple[int, ...]) -> None:
    fits = len(shape1) == len(shape2) == 3 and min(*shape1, *shape2) > 0
    if not fits or shape1[0] * shape1[1] != shape2[0] * shape2[2]:
        raise ValueError(
            f"factors (k, q, p) and (l, s, r) need l r = k q, got {shape1} and {shape2}"
        )


def project_to_blockdiag(weight: np.ndarray, nblocks: int, *, shuffle: bool = False) -> np.ndarray:
    """The diagonal blocks (nblocks, ceil(m / nblocks), ceil(n / nblocks)) of a matrix (m, n).

    `shuffle` says that the layer first permutes its (padded) input as ShuffleNet does: entry c
    nblocks + g takes the old g (n' / nblocks) + c.
    """
    rows, columns = -(-weight.shape[0] // nblocks), -(-weight.shape[1] // nblocks)
    padded = _padded(weight, nblocks * rows, nblocks * columns)
    if shuffle:
        padded = padded.reshape(-1, nblocks, columns).swapaxes(1, 2)
    grid = padded.reshape(nblocks, rows, nblocks, columns)
    index = np.arange(nblocks)
    return np.ascontiguousarray(grid[index, :, index])


def project_to_block_sparse(weight: np.ndarray, layout: np.ndarray, block: int) -> np.ndarray:
    """The blocks of a matrix (m, n) that a layout (m' / block, n' / block) keeps. Returns (kept
    blocks, block, block), in the row-major order of the layout."""
    height, width = layout.shape
    rows, columns = np.nonzero(layout)
    grid = _padded(weight, height * block, width * block).reshape(height, block, width, block)
    return np.ascontiguousarray(grid[rows, :, columns])


def entries_to_dense(
    take: Callable[[np.ndarray], np.ndarray],
    values: np.ndarray,
    out_features: int,
    in_features: int,
) -> np.ndarray:
    """The matrix (out_features, in_features) out of which `take` takes these values, zero where it
    takes nothing; values that it takes from padding are dropped. ValueError where it takes
    another shape."""
    # The number of each entry, from 1; padding is 0.
    numbers = 1 + np.arange(out_features * in_features).reshape(out_features, in_features)
    places = take(numbers)
    if places.shape != values.shape:
        raise ValueError(f"numbers of shape {values.shape} for {places.shape} in the matrix")
    dense = np.zeros(1 + numbers.size, values.dtype)
    dense[places] = values
    return dense[1:].reshape(numbers.shape)


def _padded(weight: np.ndarray, rows: int, columns: int) -> np.ndarray:
    if weight.ndim != 2 or weight.shape[0] > rows or weight.shape[1] > columns:
        raise ValueError(
            f"a weight of shape {weight.shape} does not fit: it is larger than ({rows}, {columns})"
        )
    padded = np.zeros((rows, columns), weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def _cropped(full: np.ndarray, out_features: int, in_features: int) -> np.ndarray:
    if not (0 < out_features <= full.shape[0] and 0 < in_features <= full.shape[1]):
        raise ValueError(f"({out_features}, {in_features}) cannot be cropped from {full.shape}")
    return full[:out_features, :in_features].copy()
