"""Mixup and CutMix on whole batches, with soft targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from flow_train.data.image_reader import MIXING_STREAM
from flow_train.data.images import Batch


@dataclass(frozen=True)
class Mixing:
    """How each image of a batch is mixed with its partner.

    Attributes:
        shares: float32, (batch,): lambda, the share of the image itself in its target.
        boxes: int64, (batch, 4): top, bottom, left, right of what comes from the partner.
        cut: bool, (batch,): CutMix with that box; else mixup with that share.
    """

    shares: np.ndarray
    boxes: np.ndarray
    cut: np.ndarray


@dataclass(frozen=True)
class Mixup:
    """Mixup (Zhang et al. 2018, arXiv 1710.09412) and CutMix (Yun et al. 2019, arXiv 1905.04899).

    An image's partner is the one at the same place of the reversed batch. mixup takes
    `lambda image + (1 - lambda) partner`, CutMix a box of the partner of the area 1 - lambda around
    a random point, cut off at the borders. The target of an image is
    `lambda onehot(label) + (1 - lambda) onehot(partner's label)`, for CutMix with the lambda that
    the box's real area leaves.

    Attributes:
        num_classes: length of a target.
        mixup_alpha: lambda of mixup is drawn from Beta(alpha, alpha); 0 for no mixup.
        cutmix_alpha: the same for CutMix.
        cutmix_minmax: least and largest side of the box as a share of the image's, which are then
            drawn uniformly instead; None for boxes by lambda.
        prob: how likely a batch, a pair or an image (see `mode`) is mixed at all.
        switch_prob: how likely it is CutMix where both are on.
        mode: "batch": one lambda, box and choice for all; "pair": for each pair of partners;
            "elem": for each image.
        correct_lam: False keeps CutMix's lambda as it was drawn, whatever the box's area is.
        label_smoothing: of the onehot vectors. The loss's own comes on top of it.
    """

    num_classes: int
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    cutmix_minmax: Sequence[float] | None = None
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: str = "batch"
    correct_lam: bool = True
    label_smoothing: float = 0.0

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Mixing:
        """Draw what happens to a batch of images of `shape` (batch, channels, height, width)."""
        batch, _, height, width = shape
        count = {"batch": 1, "pair": (batch + 1) // 2, "elem": batch}[self.mode]
        mixed = rng.random(count) < self.prob
        cuts = self.cutmix_alpha > 0 or self.cutmix_minmax is not None
        cut = np.full(count, cuts)
        if self.mixup_alpha > 0 and cuts:
            cut = rng.random(count) < self.switch_prob
        shares = np.ones(count)
        boxes = np.zeros((count, 4), dtype=np.int64)
        for row in np.flatnonzero(mixed):
            if cut[row]:
                shares[row], boxes[row] = self._draw_box(height, width, rng)
            else:
                shares[row] = rng.beta(self.mixup_alpha, self.mixup_alpha)
        # Element i of a batch has the draws of row[i]; partners share them in mode "pair".
        places = np.arange(batch)
        row = {
            "batch": np.zeros(batch, dtype=np.int64),
            "pair": np.minimum(places, batch - 1 - places),
            "elem": places,
        }[self.mode]
        return Mixing(shares.astype(np.float32)[row], boxes[row], (mixed & cut)[row])

    def targets(self, labels: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Soft targets, float32 (batch, classes), of int64 labels (batch,) and each image's lambda
        (batch,); rows sum to 1. UserError if a label is not below `num_classes`."""
        if labels.size and labels.max() >= self.num_classes:
            raise UserError(
                f"label {labels.max()} with mixup.num_classes {self.num_classes}; the data set has "
                "more classes"
            )
        low = np.float32(self.label_smoothing / self.num_classes)
        own = np.full((len(labels), self.num_classes), low)
        own[np.arange(len(labels)), labels] += np.float32(1 - self.label_smoothing)
        share = shares.astype(np.float32)[:, None]
        return share * own + (1 - share) * own[::-1]

    def __call__(
        self, images: np.ndarray, labels: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mix a batch in place: images float32 (batch, channels, height, width), labels int64
        (batch,). Returns the images, and the targets: float32 (batch, classes)."""
        mixing = self.draw(images.shape, rng)
        last = len(images) - 1
        # Mix pair by pair, so that two images stay in the processor's cache; the middle one of an
        # odd batch is its own partner and does not change.
        for first in range(len(images) // 2):
            a, b = images[first], images[last - first]
            parts = [_part(a, b, mixing, first), _part(b, a, mixing, last - first)]
            for image, (region, values) in zip((a, b), parts, strict=True):
                image[region] = values
        return images, self.targets(labels, mixing.shares)

    def _draw_box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[float, tuple[int, int, int, int]]:
        """lambda, and top, bottom, left, right of the box."""
        if self.cutmix_minmax is None:
            share = rng.beta(self.cutmix_alpha, self.cutmix_alpha)
            side = math.sqrt(1 - share)
            box_height, box_width = int(height * side), int(width * side)
            # The box is around a point anywhere in the image, so it may reach over its border.
            top = int(rng.integers(height)) - box_height // 2
            left = int(rng.integers(width)) - box_width // 2
        else:
            share = 1.0
            low, high = self.cutmix_minmax
            box_height, box_width = (
                int(rng.integers(int(side * low), max(int(side * high), int(side * low) + 1)))
                for side in (height, width)
            )
            top = int(rng.integers(height - box_height + 1))
            left = int(rng.integers(width - box_width + 1))
        bottom, right = min(top + box_height, height), min(left + box_width, width)
        box = (max(top, 0), bottom, max(left, 0), right)
        if self.correct_lam or self.cutmix_minmax is not None:
            share = 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width)
        return share, box


class MixBatch:
    """Mixes the batches of a loader, for its `finish`.

    The draws come from the seed, the epoch and the number of the batch, so that a resumed run mixes
    as the one that was not interrupted. All processes mix in the same way in mode "batch" and each
    in its own way else; partners are images of the same process.
    """

    def __init__(
        self, mixup: Mixup, seed: int, rank: int = 0, *, channels_last: bool = False
    ) -> None:
        self.mixup = mixup
        self._seed = seed
        self._rank = 0 if mixup.mode == "batch" else rank
        self._channels_last = channels_last

    def __call__(self, batch: Batch, epoch: int, number: int) -> Batch:
        rng = np.random.default_rng((MIXING_STREAM, self._seed, epoch, number, self._rank))
        # This is a view: the images are mixed in place.
        images = batch.images.transpose(0, 3, 1, 2) if self._channels_last else batch.images
        _, targets = self.mixup(images, batch.labels, rng)
        return Batch(batch.images, targets, batch.indices)


def build_mixup(config: Mapping[str, Any] | None, num_classes: int) -> Mixup | None:
    """The Mixup that `keys.Mixup` describes, whose `num_classes` must be the data set's; None where
    the config is None or both alphas are 0 and there is no `cutmix_minmax`. UserError for an
    unknown key or a wrong value."""
    if config is None:
        return None
    from flow_train.config import keys, schema  # late: see keys.py

    options = schema.read(keys.Mixup, config, "mixup")
    if options.num_classes not in (None, num_classes):
        raise UserError(
            f"mixup.num_classes is {options.num_classes}, the data set has {num_classes} "
            "classes; leave it out to take the data set's"
        )
    if not options.mixup_alpha and not options.cutmix_alpha and options.cutmix_minmax is None:
        return None
    return Mixup(**{**options.model_dump(), "num_classes": num_classes})


def _part(own: np.ndarray, other: np.ndarray, mixing: Mixing, place: int) -> tuple[Any, np.ndarray]:
    """Which part of an image changes, and to what: computed before its partner changes."""
    if mixing.cut[place]:
        top, bottom, left, right = mixing.boxes[place]
        region = (slice(None), slice(top, bottom), slice(left, right))
        return region, other[region].copy()
    share = mixing.shares[place]
    if share == 1:
        return (slice(0, 0),), own[:0]
    mixed = other * (1 - share)
    mixed += own * share
    return ..., mixed
