"""python -m monarch_flow.compare transforms: its matrices, errors, statements, page and picture."""

from __future__ import annotations

import math
from pathlib import Path

import oneflow_accel

import numpy as np
import pytest
import scipy.fft
import scipy.linalg

from monarch_flow import compare, expressiveness
from monarch_flow.expressiveness import FOUND, learn, nearest_errors, rows_of
from tests.tolerances import assert_close


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    oneflow_accel.select_device()


def test_the_transforms() -> None:
    """Against scipy; the closed forms' errors are of them."""
    rows = {row.name: row for row in rows_of(16)}
    eye, first_row = np.eye(16), rows["Toeplitz"].matrix[0]
    for name, matrix in {
        "DFT": scipy.linalg.dft(16),
        "inverse DFT": scipy.linalg.dft(16).conj() / 16,
        "DCT-II": scipy.fft.dct(eye, axis=0),
        "DST-II": scipy.fft.dst(eye, axis=0),
        "Walsh-Hadamard": scipy.linalg.hadamard(16),
        "convolution": scipy.linalg.circulant(rows["convolution"].matrix[:, 0]),
        "Toeplitz": scipy.linalg.toeplitz(rows["Toeplitz"].matrix[:, 0], first_row),
    }.items():
        np.testing.assert_allclose(rows[name].matrix, matrix, atol=1e-12)
    for row in rows.values():
        exact = [error for error in row.errors[4:] if not math.isnan(error)]
        assert len(exact) == (1 if row.name in ("convolution", "Toeplitz", "bit reversal") else 2)
        assert max(exact) < 1e-13


def test_nearest_errors_of_orthogonal_matrices() -> None:
    """All singular values are one, and all squares of a Hadamard matrix too; it is a Kronecker
    product, which a Monarch matrix is."""
    monarch, *others = nearest_errors(scipy.linalg.hadamard(16).astype(float))
    assert monarch < 1e-13
    # 4 of 16 singular values; 128 of 256 entries.
    assert_close(np.array(others), np.sqrt([0.75, 0.5, 0.5]), dtype="float64")
    # Each of its 16 pieces of 4 x 4 is a DFT's, of full rank, and keeps one value of four.
    assert nearest_errors(np.fft.fft(np.eye(16)))[0] == pytest.approx(math.sqrt(0.75), rel=1e-12)


def test_a_dft_is_learned() -> None:
    row = next(rows_of(8))
    error, steps, seconds = learn(row.layers[0], row.matrix, 200)
    assert error <= FOUND
    assert 20 < steps < 3000
    assert 0 < seconds < 300
    # One step after the one whose error it is.
    real = row.layers[0].dense().detach().numpy()[:8, :8]
    np.testing.assert_allclose(real, row.matrix.real / 8**0.5, atol=1e-3)


def test_a_study(tmp_path: Path, capsys, monkeypatch) -> None:
    arguments = ["transforms", "--n", "4", "16", "--minutes", "0.02", "--output", str(tmp_path)]
    assert compare.main(arguments) == 0
    page = (tmp_path / "comparison.md").read_text()
    assert page in capsys.readouterr().out
    assert (tmp_path / "comparison.png").is_file()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    table = {(line[0], line[1]): line for line in lines if line[0] in ("4", "16")}
    assert len(table) == 16
    # 4 blocks; two factors of 16 log2(16) numbers; (B B*)^2; all of them complex.
    assert table["16", "DFT"][2] == "256; 256; 1,024"
    assert all(" s)" in line[8] and " s)" in line[10] for line in table.values())
    statements = {line[0]: line[1:] for line in lines if "Dao et al. 20" in line[1]}
    assert len(statements) == 9
    assert all(line[-1] == "PASS" for line in statements.values())
    assert float(statements["Monarch squared, (M M*)^2, contains the DFT"][2]) < 1e-14

    # What does not hold is said, and nothing is learned in no time.
    monkeypatch.setattr(expressiveness, "EXACT", 0.0)
    assert compare.main([*arguments[:3], "--minutes", "0", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "comparison.md").read_text()
    assert "| FAIL |" in page
    assert " s)" not in page


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--n", "12"], "a transform of 12 values"),
        (["--n", "2"], "powers of two from 4 up"),
        (["--n", "4", "--output", "{file}"], "cannot be written to"),
    ],
)
def test_what_it_refuses(options: list[str], text: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "file"
    file.write_text("")
    texts = [option.format(file=file) for option in options]
    output = [] if "--output" in texts else ["--output", str(tmp_path)]
    assert compare.main(["transforms", *texts, *output]) == 2
    assert text in capsys.readouterr().err
