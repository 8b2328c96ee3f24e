r"""AdamW's moments of a dense weight, estimated from those of two factors of it.

A piece of a weight is T = B A (s, p), with B (s, R) and A (R, p): one piece of a Monarch matrix, or
a whole low-rank one. With G = dL/dT the factors' gradients are g_B = G A^T and g_A = B^T G. Adam
(Kingma and Ba 2015) keeps decaying averages m of the gradients and v of their squares, entry by
entry. What the dense weight would have gathered is not in them in full; here is what can be had.

**First moment.** Averaging is linear and the factors change slowly, so m_B = M A^T and
m_A = B^T M for the average M of G. All M that solve this (in the least-squares sense: the factors
did change, and no M fits both exactly) differ by what no step on the factors could ever do. The one
of least norm has nothing of that kind: it is the projection of the averaged gradient on the tangent
space {X A + B Y} of the matrices of that rank. With the thin SVDs A = U_A S_A V_A^T and
B = U_B S_B V_B^T it is a sum of three orthogonal parts:

    U_B X V_A^T          X_ij = (S_A,j (U_B^T m_B U_A)_ij + S_B,i (V_B^T m_A V_A)_ij)
                                / (S_A,j^2 + S_B,i^2)
    (I - U_B U_B^T) m_B A^+
    B^{T+} m_A (I - V_A V_A^T)

The first is seen by both factors and weighs the two equations by how strongly each sees it. Where
they agree (B^T m_B = m_A A^T) the sum is m_B (A A^T)^+ A + B (B^T B)^+ m_A (I - A^T (A A^T)^+ A).

**Second moment.** Let entries of G be uncorrelated with mean squares V of rank one, V = r c^T: the
form in which Adafactor (Shazeer and Stern 2018, section 3) keeps them. Then

    v_B[i, a] = sum_j V_ij A_aj^2 = r_i (sum_j c_j A_aj^2),
    v_A[a, j] = sum_i B_ia^2 V_ij = c_j (sum_i r_i B_ia^2),

so the row sums of v_B are r and the column sums of v_A are c up to a scale each. With
r' = v_B 1, c' = 1^T v_A and the squared norms alpha_j = sum_a A_aj^2, beta_i = sum_a B_ia^2 of the
other factor's columns and rows, the total of v_B asks for V = r' c'^T / (c' alpha), that of v_A for
V = r' c'^T / (r' beta). Both are V itself under the assumption; otherwise their geometric mean is
taken. In a network rows of G are correlated, so this is an estimate of V's size and shape, not V.
"""

from __future__ import annotations

import numpy as np

# Singular values of a factor below this share of its largest count as zero: its moments say
# nothing reliable about directions in which it hardly sees the gradient.
SINGULAR = 1e-6
# No second moment is below this share of the weight's mean: where the estimate is too small, the
# first gradient must not cause a huge step (a step is the ratio of m to the root of v).
FLOOR = 1e-3


def first_moment(
    left: np.ndarray, right: np.ndarray, moment_left: np.ndarray, moment_right: np.ndarray
) -> np.ndarray:
    """The gradient of least norm whose pull-back to the factors is nearest to their moments.

    B `left` (..., s, R) and A `right` (..., R, p) have moments of their shapes. Returns M (..., s,
    p), float64, exact where the moments come from one gradient of the tangent space.
    """
    u_left, s_left, v_left = np.linalg.svd(left, full_matrices=False)
    u_right, s_right, v_right = np.linalg.svd(right, full_matrices=False)
    s_left, s_right = _without_small(s_left), _without_small(s_right)

    seen_left = moment_left @ u_right
    seen_right = v_left @ moment_right
    core_left = _transposed(u_left) @ seen_left
    core_right = seen_right @ _transposed(v_right)
    weight_left, weight_right = s_right[..., None, :], s_left[..., :, None]
    core = _ratio(
        weight_left * core_left + weight_right * core_right, weight_left**2 + weight_right**2
    )
    outside_left = _ratio(seen_left - u_left @ core_left, weight_left)
    outside_right = _ratio(seen_right - core_right @ v_right, weight_right)
    return (u_left @ core + outside_left) @ v_right + u_left @ outside_right


def second_moment(
    left: np.ndarray, right: np.ndarray, moment_left: np.ndarray, moment_right: np.ndarray
) -> np.ndarray:
    """The rank-one estimate of the mean squares of a dense gradient's entries.

    B `left` (..., s, R) and A `right` (..., R, p) have moments >= 0 of their shapes. Returns V
    (..., s, p), float64, not negative, exact for V of rank one if entries are uncorrelated.
    """
    rows = moment_left.sum(axis=-1)
    columns = moment_right.sum(axis=-2)
    from_left = (columns * (right**2).sum(axis=-2)).sum(axis=-1)
    from_right = (rows * (left**2).sum(axis=-1)).sum(axis=-1)
    scale = np.sqrt(from_left) * np.sqrt(from_right)
    return _ratio(rows[..., :, None] * columns[..., None, :], scale[..., None, None])


def complete(moment: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Second moments (m, n) with estimates for the unknown entries, which were structural zeros.

    As in Adafactor an unknown entry is the mean of its row times the mean of its column over the
    mean of all, each over the known entries (of all of them where a row or column has none).
    """
    if known.all() or not known.any():
        return moment
    kept = np.where(known, moment, 0.0)
    overall = kept.sum() / known.sum()
    means = []
    for axis in (1, 0):
        count = known.sum(axis=axis)
        means.append(np.where(count > 0, kept.sum(axis=axis) / np.maximum(count, 1), overall))
    return np.where(known, moment, _ratio(np.outer(means[0], means[1]), np.asarray(overall)))


def with_floor(second: np.ndarray, first: np.ndarray | None) -> np.ndarray:
    """Second moments V (m, n) that AdamW can divide by: positive, at least FLOOR times their mean.

    With `first`, V is also raised to M^2, as a mean of squares is at least the square of the
    mean. Then no entry's first step exceeds the learning rate, whatever the two estimates lack.
    """
    floor = max(FLOOR * float(second.mean()), float(np.finfo(np.float32).tiny))
    raised = np.maximum(second, floor)
    return raised if first is None else np.maximum(raised, first**2)


def _without_small(values: np.ndarray) -> np.ndarray:
    largest = values.max(axis=-1, keepdims=True, initial=0.0)
    return np.where(values > SINGULAR * largest, values, 0.0)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    zero = denominator == 0
    return np.where(zero, 0.0, numerator / np.where(zero, 1.0, denominator))


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return matrix.swapaxes(-1, -2)
