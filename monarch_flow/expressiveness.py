"""What classes of structured matrices make of fast transforms: how near the nearest matrix of each
class is, how near one that Adam finds, and whether they contain what was published of them.

    python -m monarch_flow.compare transforms --n 16 64 256 1024
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from oneflow_accel import machine, select_device
from oneflow_accel.command import Parser
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from flow_train.compare.loop import INCOMPLETE, PAGE, PICTURE
from flow_train.compare.rows import markdown
from flow_train.files import replace_file
from flow_train.metrics.curves import new_figure, save_figure
from monarch_flow.layers import ButterflyLinear, KaleidoscopeLinear, block_sparse
from monarch_flow.layers.butterfly import input_order
from monarch_flow.layers.structured import fill
from monarch_flow.projection import monarch_to_dense, project_to_monarch, transforms

# A relative error at which learning has found a matrix, and one that is only float64's rounding.
FOUND, EXACT = 1e-4, 1e-12
LARGEST_LEARNED = 256
_STEPS, _RATES = 1000, (0.1, 0.3, 0.03)
_HEADS = (
    *("Monarch", "low rank", "block-diagonal", "flat butterfly"),
    *("butterfly, exact", "butterfly, learned", "kaleidoscope, exact", "kaleidoscope, learned"),
)
_NOTES = f"""\
Errors are relative, in the Frobenius norm. Numbers are those stored by Monarch of sqrt(n) blocks,
and as many by low rank, block-diagonal and flat butterfly; by the butterfly; by the kaleidoscope.
The first four are the nearest matrices of their classes (truncated singular values, for Monarch of
each piece; kept entries): learning cannot beat them. Exact is the closed form; learned, what Adam
made of random factors, by all entries, in float64 (Dao et al. 2019), with steps and seconds: rates
{_RATES} in turns, {_STEPS:,} steps each with a cosine to 0, until {FOUND:.0e} or the
end of its time. The butterfly's permutation is given: bit reversal for Fourier, Makhoul's for
cosine and sine, else none. The kaleidoscope is as wide as its closed form."""


class Row(NamedTuple):
    """A transform: its matrix (n, n), the butterfly and the kaleidoscope to be it, with the factors
    of the closed form or random ones, errors by _HEADS, NaN where there is none, and what there is
    to say about the learned ones."""

    name: str
    matrix: np.ndarray
    layers: tuple[ButterflyLinear, ButterflyLinear]
    errors: list[float]
    remarks: list[str]

    def cells(self) -> list[str]:
        """What the table has of it."""
        points = len(self.matrix)
        stored = (1 + np.iscomplexobj(self.matrix)) * 2 * points**2 // _blocks(points)
        counts = stored, *(layer.factors.numel() for layer in self.layers)
        texts = ["-" if math.isnan(error) else f"{error:.1e}" for error in self.errors]
        cells = [f"{text}{remark}" for text, remark in zip(texts, self.remarks, strict=True)]
        return [str(points), self.name, "; ".join(f"{count:,}" for count in counts), *cells]


def rows_of(points: int) -> Iterator[Row]:
    """The transforms of so many values, nothing learned yet; UserError where they are not a power
    of two, at least 4."""
    double, index, level = flow.float64, np.arange(points), np.array([[1.0, 1.0], [1.0, -1.0]])
    fourier = transforms.dft(points, double), transforms.inverse_dft(points, double)
    eye, reversal = np.eye(points), input_order("bit_reversal", points)
    rows, angle = index[:, None], np.pi * (2 * index + 1) / (2 * points)
    hadamard = functools.reduce(np.kron, [level] * (points.bit_length() - 1))
    first, row = np.random.default_rng(0).standard_normal((2, points))
    row[0] = first[0]
    circulant = first[rows - index]
    toeplitz = np.where(rows < index, row[index - rows], circulant)
    cases: list[tuple[str, np.ndarray, ButterflyLinear]] = [
        ("DFT", np.fft.fft(eye), fourier[0]),
        ("inverse DFT", np.fft.ifft(eye), fourier[1]),
        ("DCT-II", 2 * np.cos(rows * angle), transforms.dct(points, double)),
        ("DST-II", 2 * np.sin((rows + 1) * angle), transforms.dst(points, double)),
        ("Walsh-Hadamard", hadamard, transforms.walsh_hadamard(points, double)),
        ("convolution", circulant, transforms.circulant(first, double)),
        ("Toeplitz", toeplitz, transforms.toeplitz(first, row, double)),
        ("bit reversal", eye[reversal], transforms.permutation(reversal, double)),
    ]
    for name, matrix, layer in cases:
        errors = [*nearest_errors(matrix), *[math.nan, math.nan, _error(layer, matrix), math.nan]]
        if isinstance(layer, KaleidoscopeLinear):
            like = points, points, False, "none", layer.expansion, layer.complex_pairs
            layers = ButterflyLinear(*like, dtype=double), layer
        else:
            layers = layer, transforms.as_kaleidoscope(layer)
            errors[4], errors[6] = errors[6], _error(layers[1], matrix)
        yield Row(name, matrix, layers, errors, [""] * len(_HEADS))


def nearest_errors(matrix: np.ndarray) -> list[float]:
    """Of the nearest matrices of the first four classes, which store as many numbers."""
    points, blocks = len(matrix), _blocks(len(matrix))
    diagonal = block_sparse.BlockdiagSparsityConfig(nblocks=blocks // 2, block=1)
    flat = block_sparse.FlatBlockButterflySparsityConfig
    masks = diagonal, flat(butterfly_size=blocks, n_factors=1, block=1)
    kept = [np.where(mask.mask(points, points), matrix, 0) for mask in masks]
    rest = np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[points // blocks :])
    monarch, *masked = (_distance(near, matrix) for near in (_monarch(matrix), *kept))
    return [monarch, float(rest / np.linalg.norm(matrix)), *masked]


def learn(layer: ButterflyLinear, matrix: np.ndarray, seconds: float) -> tuple[float, int, float]:
    """Learn the factors, which change, from random ones, until FOUND or for so long. Returns the
    least error, and steps and seconds of all tries."""
    wanted, start, steps, best = _real(matrix), time.perf_counter(), 0, math.inf
    rates = itertools.cycle(_RATES)
    # As large as an orthogonal matrix, which the product of random factors is, too.
    wanted = wanted[:, : len(matrix)] * math.sqrt(len(wanted)) / np.linalg.norm(wanted)
    # Real inputs tell all of a complex matrix.
    inputs, target = (flow.tensor(x) for x in (np.eye(len(matrix), layer.in_features), wanted.T))
    flow.manual_seed(0)
    while True:
        layer.reset_parameters()
        rate, began = next(rates), time.perf_counter()
        optimizer = flow.optim.Adam(layer.parameters(), lr=rate)
        for step in range(_STEPS):
            # A try with less time for its steps comes to a rate of 0, too.
            spent = (time.perf_counter() - began) / max(start + seconds - began, 1e-3)
            if best <= FOUND or (spent >= 1 and steps):
                return best, steps, time.perf_counter() - start
            share = min(max(step / _STEPS, spent), 1)
            optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
            loss = (layer(inputs) - target).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps, best = steps + 1, min(best, math.sqrt(float(loss.numpy()) / len(matrix)))


def claims(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Published statements about the transforms of n values, by whom, and the error of a check by
    closed forms; `rows` are those of `rows_of`."""
    butterfly, kaleidoscope = ([row.errors[at] for row in rows] for at in (4, 6))
    points = len(rows[0].matrix)
    columns = rows[0].matrix[:, np.arange(points).reshape(_blocks(points), -1).T.ravel()]
    order = np.random.default_rng(1).permutation(points)
    permuted = _error(transforms.permutation(order, flow.float64), np.eye(points)[order])
    matrix = ButterflyLinear(points, points, False, dtype=flow.float64).dense().detach().numpy()
    inside = [_distance(_monarch(whole), whole) for whole in (matrix, columns)]
    known = "Dao et al. 2019", "Dao et al. 2020", "Dao et al. 2022"
    return {
        ("B P is the DFT", known[0]): max(butterfly[:2]),
        ("Re(B P) is the DCT and the DST", known[0]): max(butterfly[2:4]),
        ("B is the Walsh-Hadamard transform", known[0]): butterfly[4],
        ("Kaleidoscope B B* captures convolution exactly", known[1]): max(kaleidoscope[5:7]),
        ("Kaleidoscope B B* captures permutations", known[1]): max(permuted, kaleidoscope[7]),
        ("Kaleidoscope (B B*)^2 contains DFT, DCT and DST", known[1]): max(kaleidoscope[:4]),
        ("Monarch contains butterfly", known[2]): inside[0],
        ("Monarch, after a permutation, is the DFT", known[2]): inside[1],
        ("Monarch squared, (M M*)^2, contains the DFT", known[2]): _monarch_squared(rows[0]),
    }


def _monarch_squared(row: Row) -> float:
    """The error, as the DFT, of four Monarch matrices, every second one transposed: those nearest
    to the passes of the kaleidoscope that is the DFT."""
    size, product = 2 * len(row.matrix), np.eye(len(row.matrix), dtype=complex)
    layer = ButterflyLinear(size, size, False, complex_pairs=True, dtype=flow.float64)
    for number, factors in enumerate(row.layers[1].factors.numpy()):
        # B* transposed is a B of the transposed matrices.
        turned = number % 2 == 0
        fill(layer.factors, (factors.swapaxes(2, 3) if turned else factors)[None])
        real, imaginary = np.split(layer.dense().numpy()[:, : size // 2], 2)
        near = _monarch(real + 1j * imaginary)
        product = (near.T if turned else near) @ product
    return _distance(product, row.matrix)


def _blocks(points: int) -> int:
    """Of a Monarch matrix: sqrt(n), or the power of two below it."""
    return 1 << ((points.bit_length() - 1) // 2)


def _monarch(matrix: np.ndarray) -> np.ndarray:
    return monarch_to_dense(*project_to_monarch(matrix, _blocks(len(matrix))))


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _real(matrix: np.ndarray) -> np.ndarray:
    """What a complex matrix does to real parts followed by imaginary ones."""
    if not np.iscomplexobj(matrix):
        return matrix
    return np.block([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]])


def _error(layer: ButterflyLinear, matrix: np.ndarray) -> float:
    return _distance(layer.dense().detach().numpy(), _real(matrix))


def _draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each n: errors as numbers, and by color."""
    sizes = sorted({len(row.matrix) for row in rows})
    figure = new_figure(2 + 4.5 * len(sizes), 4.6, "Relative error by transform and class")
    for place, size in enumerate(sizes):
        own = [row for row in rows if len(row.matrix) == size]
        axes = figure.add_subplot(1, len(sizes), place + 1)
        values = np.array([row.errors for row in own])
        logs = np.log10(np.maximum(values, 1e-16))
        axes.imshow(logs, cmap="RdYlGn_r", vmin=-6, vmax=0, aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            text = "" if math.isnan(value) else f"{value:.2f}" if value > 0.01 else f"{value:.0e}"
            axes.text(x, y, text, ha="center", va="center", fontsize=7)
        axes.set_title(f"n = {size:,}")
        axes.set_xticks(range(len(_HEADS)), _HEADS, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(own)), [] if place else [row.name for row in own])
    save_figure(figure, path)


def main(argv: Sequence[str]) -> int:
    """The command; its exit code says whether all statements hold."""
    parser = Parser(prog="python -m monarch_flow.compare transforms", description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64, 256], help="powers of two")
    text = f"for learning, of n up to {LARGEST_LEARNED}; 0 learns nothing"
    parser.add_argument("--minutes", type=float, default=25.0, help=text)
    folder = Path(os.environ.get("RESULT_DIR", "runs"), "studies", "transforms")
    parser.add_argument("--output", type=Path, default=folder, help="folder of table and picture")
    options = parser.parse_args(argv)
    if min(options.n) < 4 or options.minutes < 0:
        parser.error("--n takes powers of two from 4 up, and --minutes none below 0")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--output {options.output} cannot be written to: {problem}") from problem
    device, start = select_device().properties().name, time.perf_counter()
    sizes = sorted(set(options.n))
    by_size = [list(rows_of(size)) for size in sizes]
    rows, checks = [row for own in by_size for row in own], [claims(own) for own in by_size]
    failed = [key for key in checks[0] if max(check[key] for check in checks) > EXACT]
    statements = [["statement", "of", *(f"error, n = {size}" for size in sizes), ""]]
    for key in checks[0]:
        errors = [f"{check[key]:.1e}" for check in checks]
        statements.append([*key, *errors, "FAIL" if key in failed else "PASS"])
    small = [row for row in rows if len(row.matrix) <= LARGEST_LEARNED and options.minutes]
    left, weights = 60 * options.minutes, 2 * sum(math.sqrt(len(row.matrix)) for row in small)
    for row, at in itertools.product(small, (0, 1)):
        # Large ones take longer; what one leaves over is for those after it.
        weight = math.sqrt(len(row.matrix))
        error, steps, seconds = learn(row.layers[at], row.matrix, left * weight / weights)
        left, weights = left - seconds, weights - weight
        column = 5 + 2 * at
        row.errors[column], row.remarks[column] = error, f" ({steps:,}, {seconds:.0f} s)"
        cells = row.cells()
        print(f"{cells[1]} of {cells[0]}, {_HEADS[column]}: {cells[3 + column]}", flush=True)
    passed = (time.perf_counter() - start) / 60
    where = f"{device}, {machine.cores()} CPU cores, {datetime.now().astimezone().date()}"
    _draw(rows, options.output / PICTURE)
    page = "\n\n".join(
        (
            "# Fast transforms as structured matrices",
            markdown([["n", "transform", "numbers", *_HEADS], *(row.cells() for row in rows)]),
            _NOTES,
            markdown(statements),
            f"![Relative error by transform and class]({PICTURE})",
            f"{passed:.1f} minutes on {where}.",
        )
    )
    replace_file(options.output / PAGE, f"{page}\n".encode())
    print(f"{page}\n\ntable: {options.output / PAGE}")
    return INCOMPLETE if failed else 0
