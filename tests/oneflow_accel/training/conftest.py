"""Image folders for the tests of the data pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launch import REPOSITORY


@pytest.fixture(scope="session")
def flowers() -> Path:
    """Real photos: 5 classes, train and val."""
    folder = REPOSITORY.parent / "shared" / "data" / "photos" / "flowers5"
    if not folder.is_dir():
        pytest.skip("no shared data")
    return folder


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
