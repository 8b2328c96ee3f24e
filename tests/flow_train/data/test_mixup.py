"""Mixup and CutMix: as timm's on the same draws, with the right draws, in training only."""

from __future__ import annotations

import math

from oneflow_accel.errors import UserError

import numpy as np
import pytest

from flow_train.data.images import Batch
from flow_train.data.mixup import MixBatch, Mixing, Mixup, build_mixup

CLASSES = 7


def batch(size: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((size, 3, 16, 20)).astype(np.float32)
    return images, rng.integers(CLASSES, size=size)


class Given(Mixup):
    """Mixes with what the test says instead of what it draws."""

    mixing: Mixing

    def draw(self, shape, rng):
        return self.mixing


def test_equal_to_timm(timm_golden):
    assert [case["cutmix"] for case in timm_golden["mixup"]] == [False, True, True]
    for case in timm_golden["mixup"]:
        shape = tuple(case["shape"])
        images = np.array(case["images"], dtype=np.float32).reshape(shape)
        box = case["box"] or [0, 0, 0, 0]
        share = case["lam"]
        if case["cutmix"]:
            share = 1 - (box[1] - box[0]) * (box[3] - box[2]) / (shape[2] * shape[3])
        mixup = Given(case["num_classes"], cutmix_alpha=1.0, label_smoothing=0.1)
        given = Mixing(
            np.full(shape[0], share, dtype=np.float32),
            np.tile(box, (shape[0], 1)),
            np.full(shape[0], case["cutmix"]),
        )
        object.__setattr__(mixup, "mixing", given)
        mixed, targets = mixup(images, np.array(case["labels"]), np.random.default_rng(0))
        expected = np.array(case["mixed"]).reshape(shape)
        np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(targets, case["targets"], rtol=1e-6, atol=1e-7)


def reference(images: np.ndarray, labels: np.ndarray, mixing: Mixing):
    """Image by image, in float64."""
    onehot, images = np.eye(CLASSES)[labels], images.astype(np.float64)
    mixed, targets = images.copy(), onehot.copy()
    for place, share in enumerate(mixing.shares.astype(np.float64)):
        other = images[::-1][place]
        if mixing.cut[place]:
            top, bottom, left, right = mixing.boxes[place]
            mixed[place, :, top:bottom, left:right] = other[:, top:bottom, left:right]
        else:
            mixed[place] = share * images[place] + (1 - share) * other
        targets[place] = share * onehot[place] + (1 - share) * onehot[::-1][place]
    return mixed, targets


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_every_mode_mixes_with_the_reversed_batch(mode):
    mixup = Mixup(CLASSES, mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode, prob=0.8)
    for seed, size in enumerate((8, 7, 7, 8, 1)):
        images, labels = batch(size, seed)
        mixing = mixup.draw(images.shape, np.random.default_rng(seed))
        expected, expected_targets = reference(images, labels, mixing)
        mixed, targets = mixup(images.copy(), labels, np.random.default_rng(seed))
        assert mixed.dtype == targets.dtype == np.float32
        np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(targets, expected_targets, atol=1e-6)
        if mode == "batch":
            assert len(set(mixing.shares.tolist())) == 1
        if mode == "pair":
            np.testing.assert_array_equal(mixing.shares, mixing.shares[::-1])
            np.testing.assert_array_equal(mixing.boxes, mixing.boxes[::-1])


def draws(mixup: Mixup, count: int) -> list[Mixing]:
    return [mixup.draw((2, 3, 64, 64), np.random.default_rng((9, n))) for n in range(count)]


def test_distributions():
    # Beta(0.8, 0.8): mean 1/2, variance 1 / (4 (2 alpha + 1)).
    shares = np.array([d.shares[0] for d in draws(Mixup(2, mixup_alpha=0.8), 4000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * 2.6), rel=0.05)
    mixings = draws(Mixup(2, mixup_alpha=0, cutmix_alpha=1.0), 4000)
    assert all(d.cut.all() for d in mixings)
    boxes = np.array([d.boxes[0] for d in mixings])
    areas = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / 4096
    shares = np.array([d.shares[0] for d in mixings])
    np.testing.assert_allclose(shares, 1 - areas, atol=1e-6)
    assert boxes.min() >= 0
    assert boxes.max() <= 64
    # A side of s = sqrt(1 - lambda), centered uniformly and cut off, has s (1 - s / 4) left on
    # average; with lambda uniform the mean area is the integral of 2 s^3 (1 - s / 4)^2.
    s = np.linspace(0, 1, 10001)
    assert areas.mean() == pytest.approx(np.trapz(2 * s**3 * (1 - s / 4) ** 2, s), abs=0.02)


def test_probabilities_and_sides():
    mixup = Mixup(2, mixup_alpha=0.8, cutmix_minmax=(0.25, 0.5), prob=0.7, switch_prob=0.3)
    mixings = draws(mixup, 4000)
    cut = np.mean([d.cut[0] for d in mixings])
    unmixed = np.mean([d.shares[0] == 1 and not d.cut[0] for d in mixings])
    assert cut == pytest.approx(0.7 * 0.3, abs=4 * math.sqrt(0.21 * 0.79 / 4000))
    assert unmixed == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 4000))
    for mixing in mixings:
        top, bottom, left, right = mixing.boxes[0]
        if mixing.cut[0]:
            assert 16 <= bottom - top < 32
            assert 16 <= right - left < 32
            area = (bottom - top) * (right - left) / 4096
            assert mixing.shares[0] == pytest.approx(1 - area)


def test_draws_come_from_seed_epoch_and_batch():
    def mixed(mode: str, seed: int, rank: int, epoch: int, number: int) -> np.ndarray:
        images, labels = batch()
        mixup = Mixup(CLASSES, mixup_alpha=0.8, cutmix_alpha=1.0, mode=mode)
        found = MixBatch(mixup, seed, rank)(Batch(images, labels, np.arange(8)), epoch, number)
        return np.concatenate([found.images.reshape(8, -1), found.labels], axis=1)

    first = mixed("batch", 1, 0, 2, 3)
    np.testing.assert_array_equal(mixed("batch", 1, 0, 2, 3), first)
    # All processes mix in the same way; another seed, epoch or batch is mixed in another way.
    np.testing.assert_array_equal(mixed("batch", 1, 1, 2, 3), first)
    for other in ((2, 0, 2, 3), (1, 0, 3, 3), (1, 0, 2, 4)):
        assert np.abs(mixed("batch", *other) - first).max() > 1e-3
    # By image, each process has its own draws.
    assert np.abs(mixed("elem", 1, 1, 2, 3) - mixed("elem", 1, 0, 2, 3)).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mixup_alfa": 1}, r"no key mixup\.mixup_alfa; did you mean mixup\.mixup_alpha"),
        ({"prob": 2}, r"mixup\.prob=2"),
        ({"mixup_alpha": -1}, r"mixup\.mixup_alpha=-1"),
        ({"mode": "image"}, "mixup.mode='image': it must be batch, pair or elem"),
        ({"num_classes": 10}, "mixup.num_classes is 10, the data set has 7 classes"),
        ({"cutmix_minmax": [0.5, 0.2]}, "cutmix_minmax is"),
    ],
)
def test_wrong_configurations_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build_mixup(config, CLASSES)


def test_configurations():
    upstream = {"_target_": "src.datamodules.timm_mixup.TimmMixup", "num_classes": CLASSES}
    upstream |= {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 1.0, "switch_prob": 0.5}
    upstream |= {"mode": "batch", "label_smoothing": 0.0}
    assert build_mixup(upstream, CLASSES) == Mixup(CLASSES, 0.8, 1.0)
    assert build_mixup(None, CLASSES) is None
    assert build_mixup({"mixup_alpha": 0.0, "cutmix_alpha": 0.0}, CLASSES) is None
    with pytest.raises(UserError, match=r"label 9 with mixup\.num_classes 7"):
        Mixup(CLASSES).targets(np.array([9]), np.ones(1))
