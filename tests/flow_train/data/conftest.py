"""Data sets for the tests."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launch import REPOSITORY


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    folder = REPOSITORY.parent / "shared" / "data" / "mnist"
    if not folder.is_dir():
        pytest.skip("no shared data")
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """A small data set in MNIST's form: 300 training images of 10 classes, 40 test images."""
    root = tmp_path / "digits"
    root.mkdir()
    rng = np.random.default_rng(0)
    for stem, count in (("train", 300), ("t10k", 40)):
        images = rng.integers(0, 256, (count, 28, 28))
        labels = np.arange(count) * 7 % 10
        # The training files gzipped, the others not.
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx_bytes(array)
            if stem == "train":
                (root / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(data))
            else:
                (root / f"{stem}-{name}-ubyte").write_bytes(data)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """PNGs in train/CLASS and val/CLASS: 24 and 9 of three classes, of different sizes."""
    root = tmp_path / "photos"
    rng = np.random.default_rng(1)
    for part, count in (("train", 24), ("val", 9)):
        for number in range(count):
            folder = root / part / ("ant", "bee", "cat")[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(20, 50, 2)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return root


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """240 small JPEGs of different sizes in three classes."""
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    for number in range(240):
        folder = root / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(20, 60, 2)
        # Smooth noise: survives JPEG and tells two crops apart.
        pixels = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        pixels.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(
            folder / f"{number:03d}.jpg", quality=90
        )
    return root
