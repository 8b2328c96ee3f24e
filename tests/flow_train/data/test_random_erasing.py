"""Random erasing: how often, how much, and what is put there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flow_train.data.augment import RandomErasing

# A value that no draw gives.
MARK = 1e9


def erased(mode: str = "const", seed: int = 0, **options) -> np.ndarray:
    image = np.full((60, 80, 3), MARK, dtype=np.float32)
    result = RandomErasing(options.pop("prob", 1.0), mode, **options)(
        image, np.random.default_rng(seed)
    )
    assert result is image
    return image


def box_of(image: np.ndarray) -> tuple[int, int, int, int]:
    changed = (image != MARK).any(axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    box = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    assert changed[box[0] : box[1], box[2] : box[3]].all()
    return box


def test_probability():
    draws = 2000
    hits = sum((erased(seed=seed, prob=0.25) != MARK).any() for seed in range(draws))
    assert hits / draws == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / draws))
    assert (erased(prob=0.0) == MARK).all()


def test_boxes_have_areas_and_aspects_in_range_at_any_place():
    areas, aspects, tops = [], [], []
    for seed in range(1500):
        top, bottom, left, right = box_of(erased(seed=seed))
        assert 0 <= top < bottom <= 60
        assert 0 <= left < right <= 80
        areas.append((bottom - top) * (right - left) / 4800)
        aspects.append(math.log((bottom - top) / (right - left)))
        tops.append(top / (60 - (bottom - top)))
    # Sides are rounded to whole pixels.
    assert min(areas) > 0.015
    assert max(areas) < 0.36
    # Uniform in area but for the few that do not fit; symmetric in the logarithm of the aspect.
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.015)
    assert max(map(abs, aspects)) < math.log(1 / 0.3) + 0.1
    assert np.mean(aspects) == pytest.approx(0, abs=0.1)
    assert np.mean(tops) == pytest.approx(0.5, abs=0.03)


def test_contents():
    top, bottom, left, right = box_of(erased("const", 1))
    assert (erased("const", 1)[top:bottom, left:right] == 0).all()
    color = erased("rand", 1)[top:bottom, left:right]
    assert (color == color[0, 0]).all()
    assert len(set(color[0, 0].tolist())) == 3
    noise = np.concatenate(
        [image[(image != MARK).all(axis=2)] for image in (erased("pixel", s) for s in range(40))]
    )
    assert noise.dtype == np.float32
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert len(np.unique(noise)) > 0.9 * noise.size


def test_several_boxes_share_the_area():
    covered = [(erased(seed=seed, count=4) != MARK).any(axis=2).mean() for seed in range(600)]
    # Boxes may overlap, and one that finds no place is left out.
    assert max(covered) < 0.36
    assert 0.1 < np.mean(covered) < 0.18
    assert all((erased("pixel", s, count=4) != MARK).any() for s in range(20))


def test_deterministic_and_gray():
    np.testing.assert_array_equal(erased("pixel", 5), erased("pixel", 5))
    gray = np.ones((28, 28, 1), dtype=np.float32)
    assert RandomErasing(1.0, "pixel")(gray, np.random.default_rng(0)).shape == (28, 28, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"prob": 1.5},
        {"prob": 0.5, "mode": "noise"},
        {"prob": 0.5, "count": 0},
        {"prob": 0.5, "area": (0.5, 0.2)},
        {"prob": 0.5, "aspect": (0.0, 1.0)},
    ],
)
def test_wrong_options(options):
    with pytest.raises(ValueError, match=r"probability|area"):
        RandomErasing(**options)
