"""Image data for training: sources, augmentation, mixing, and the loaders of a run."""

from __future__ import annotations

from flow_train.data.datamodule import ImageDataModule
from flow_train.data.mixup import Mixup, build_mixup
from flow_train.data.mnist import MnistImages
from flow_train.data.rand_augment import RandAugment, parse_rand_augment
from flow_train.data.random_erasing import RandomErasing
from flow_train.data.repeated_augment import RepeatedAugmentation

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
