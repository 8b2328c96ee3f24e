"""NaN and infinity in the inputs of a record's cases: where they must come out of the kernel.

One element of one input is replaced. The output and the gradients have the record's reference's
classes: finite, NaN, infinity or -infinity. An element that the replaced one has no influence on
(another finite value there changes nothing) may be finite where the reference says 0 * NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from tests.tolerances import assert_close

VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
# Larger cases differ by what they do with threads, which NaN does not.
MOST_ELEMENTS = 3000


class Strictness(Enum):
    """How closely a kernel follows the reference's classes.

    EXACT: each class is the reference's.
    REGROUPED: the kernel adds its products up in another order, and multiplies with zeros that the
        reference leaves out or the other way round: NaN and the infinities may stand for each
        other, unless a NaN went in.
    """

    EXACT = auto()
    REGROUPED = auto()


@dataclass(frozen=True)
class Planted:
    """The arrays of a case, of which the element `at` of the array `index` is `value`."""

    arrays: list[np.ndarray]
    index: int
    at: int
    value: float

    def with_value(self, value: float) -> Planted:
        arrays = list(self.arrays)
        arrays[self.index] = arrays[self.index].copy()
        arrays[self.index].reshape(-1)[self.at] = value
        return Planted(arrays, self.index, self.at, value)


def fits(arrays: Sequence[np.ndarray]) -> bool:
    sizes = [array.size for array in arrays]
    return 0 not in sizes and sum(sizes) <= MOST_ELEMENTS


def planted(arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Planted]]:
    """Each value in each floating-point array, somewhere, with a name for messages."""
    for index, array in enumerate(arrays):
        if array.dtype.kind != "f" or array.size == 0:
            continue
        for number, (name, value) in enumerate(VALUES.items()):
            at = int(np.random.default_rng([index, number, array.size]).integers(array.size))
            yield (
                f"{name} in input {index}",
                Planted(list(arrays), index, at, 0.0).with_value(value),
            )


def influenced(
    compute: Callable[[list[np.ndarray]], list[np.ndarray | None]], case: Planted
) -> list[np.ndarray | None]:
    """Which elements of what the reference computes change with the planted one."""
    results = [compute(case.with_value(value).arrays) for value in (0.25, 1e3, -1e3)]
    return [
        None if first is None else (first != second) | (first != third)
        for first, second, third in zip(*results, strict=True)
    ]


def assert_same_classes(
    actual: np.ndarray,
    expected: np.ndarray,
    reached: np.ndarray,
    case: Planted,
    strictness: Strictness,
    *,
    dtype: str,
    reduced: int,
    what: str,
) -> None:
    """`actual` has the classes of `expected`, and its finite values where both are finite."""
    actual = np.asarray(actual, dtype=np.float64)
    wanted, found = _classes(expected), _classes(actual)
    wrong = (wanted != found) & reached
    if strictness is Strictness.EXACT:
        # Nothing else may be touched.
        wrong |= (wanted == 0) & (found != 0)
    elif not np.isnan(case.value):
        wrong &= (wanted == 0) | (found == 0)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements are of another class than the "
            f"reference's, first {first}: {actual[first]}, not {expected[first]}"
        )
    both = (wanted == 0) & (found == 0)
    assert_close(actual[both], np.asarray(expected)[both], dtype=dtype, reduced=reduced)


def _classes(x: np.ndarray) -> np.ndarray:
    """0 where x is finite, 1 or -1 where infinite, 2 where NaN."""
    x = np.asarray(x, dtype=np.float64)
    return np.where(np.isnan(x), 2.0, np.where(np.isinf(x), np.sign(x), 0.0))
