"""Image data for training: sources, augmentation, mixing, and the loaders of a run."""

from __future__ import annotations

from monarch_flow.data.datamodule import ImageDataModule
from monarch_flow.data.mixup import Mixup, build_mixup
from monarch_flow.data.mnist import MnistImages
from monarch_flow.data.rand_augment import RandAugment, parse_rand_augment
from monarch_flow.data.random_erasing import RandomErasing
from monarch_flow.data.repeated_augment import RepeatedAugmentation

__all__ = [
    "ImageDataModule",
    "Mixup",
    "MnistImages",
    "RandAugment",
    "RandomErasing",
    "RepeatedAugmentation",
    "build_mixup",
    "parse_rand_augment",
]
