"""The images of a run, as its configuration describes them: three loaders, the same on any number
of processes and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np

from flow_train.config import keys
from flow_train.config.schema import read
from flow_train.data.augment import build_eval_transform, build_train_transform
from flow_train.data.image_reader import Arrangement, Dataset, RepeatedAugmentation, each_once
from flow_train.data.images import Batch, ImageLoader, contents
from flow_train.data.mixup import MixBatch, build_mixup
from flow_train.data.parts import Subset, read_parts
from flow_train.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalization, Transform

# Mean and standard deviation of images in the range 0 to 1. Gray photos: the mean over ImageNet's
# channels.
_MNIST_STATISTICS = ((0.1307,), (0.3081,))
_GRAY_STATISTICS = ((0.449,), (0.226,))

logger = logging.getLogger("oneflow_accel")


class KeptLoader:
    """A loader of evaluation images that keeps what it has read, for small sets read often."""

    def __init__(self, loader: ImageLoader) -> None:
        self._loader = loader
        self._batches: list[Batch] | None = None
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.global_batch_size = loader.global_batch_size
        self.bad_files = loader.bad_files

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is not None:
            yield from self._batches
            return
        batches = []
        for batch in self._loader:
            batches.append(batch)
            yield batch
        # Kept only here: whoever stops earlier has not seen all.
        self._batches = batches
        self._loader.close()

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Does nothing: evaluation is the same in every epoch, and begins at its beginning."""

    def close(self) -> None:
        self._loader.close()


class ImageDataModule:
    """Loaders of training, validation and test images: `train_loader`, whose labels are soft with
    mixup, `val_loader` and `test_loader`.

    Args:
        data_dir: a folder or a .tar or .zip with `train/CLASS/...` and `val/CLASS/...` (`test/...`
            too, if there is one), a folder of class folders, or one with MNIST's files. Not used by
            synthetic images, which are noise for measurements.
        dataset, image_size, batch_size, options: see `keys.Datamodule`, which has their defaults.
        seed: of order, augmentation, mixing and splits.
        rank, world_size: of this process; None asks oneflow.
        training: False leaves out the training images, which need not be there then, and their
            loader: it is None.
        limit_eval: how many of so many validation or test images are used; they are spread evenly
            over the data set, and so over its classes. None uses all.

    `image_shape` is (channels, height, width). A UserError, or a DataError if the data is missing,
    damaged or too small, names what to change.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        dataset: str | None = None,
        image_size: int | None = None,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        training: bool = True,
        limit_eval: Callable[[int], int] | None = None,
        **options: Any,
    ) -> None:
        first = {"dataset": dataset, "image_size": image_size, "batch_size": batch_size}
        given = {key: value for key, value in first.items() if value is not None}
        folder = None if data_dir is None else str(data_dir)
        self._options = read(
            keys.Datamodule, {"data_dir": folder, **given, **options}, "datamodule"
        )
        options = self._options.model_dump()
        size, is_mnist = self._options.image_size, self._options.dataset == "mnist"
        if not self._options.drop_last:
            logger.warning(
                "datamodule.drop_last=False: training leaves out what does not fill a global batch "
                "all the same; evaluation leaves out nothing"
            )
        normalization = _normalization(self._options)
        parts = read_parts(self._options, normalization.channels, seed, training=training)
        if limit_eval is not None:
            val = _spread(parts.val, limit_eval)
            test = val if parts.test is parts.val else _spread(parts.test, limit_eval)
            parts = replace(parts, val=val, test=test)
        self._parts = parts
        self.num_classes = parts.num_classes
        if self._options.num_classes not in (None, self.num_classes):
            raise UserError(
                f"datamodule.num_classes is {self._options.num_classes}, {data_dir} has "
                f"{self.num_classes} classes; leave it out to take the data's"
            )
        self.image_shape = (normalization.channels, size, size)
        self._seed = seed
        self._rank = distributed.rank() if rank is None else rank
        self._world_size = distributed.world_size() if world_size is None else world_size
        mixup = build_mixup(options["mixup"], self.num_classes)
        # Digits are not cropped unless that is asked for.
        uncropped = {"crop_pct": 1.0, "interpolation": "bilinear"} if is_mnist else None
        augmented = options["train_transforms"] or ({"no_aug": True} if is_mnist else None)
        exact = {"exact_size": parts.exact_size}
        train_transform = build_train_transform(size, normalization, augmented, **exact)
        val_transform, test_transform = (
            build_eval_transform(
                size,
                normalization,
                options[name] or options["val_transforms"] or uncropped,
                name=name,
                **exact,
            )
            for name in ("val_transforms", "test_transforms")
        )
        self.train_loader = None
        if parts.train is not None:
            self.train_loader = self._loader(
                parts.train,
                train_transform,
                train=True,
                arrangement=_arrangement(self._options.shuffle, self._options.num_aug_repeats),
                finish=None if mixup is None else MixBatch(mixup, seed, self._rank),
            )
        loader = self._loader(parts.val, val_transform, train=False)
        self.val_loader = KeptLoader(loader) if self._options.cache_val_dataset else loader
        self.test_loader = self._loader(parts.test, test_transform, train=False)

    def contents(self) -> dict[str, Any]:
        """What makes the data the same on all machines of a job, by what to call it."""
        parts = self._parts
        return {**contents(parts.train, "train"), **contents(parts.val, "val")}

    def close(self) -> None:
        """End the worker processes of all loaders; they start again where they are needed."""
        for loader in (self.train_loader, self.val_loader, self.test_loader):
            if loader is not None:
                loader.close()

    def _loader(
        self, dataset: Dataset, transform: Transform, *, train: bool, **options: Any
    ) -> ImageLoader:
        size = self._options.batch_size
        return ImageLoader(
            dataset,
            batch_size=size if train else self._options.batch_size_eval or size,
            transform=transform,
            workers=self._options.num_workers,
            seed=self._seed,
            train=train,
            rank=self._rank,
            world_size=self._world_size,
            **options,
        )


def _spread(dataset: Dataset, limit: Callable[[int], int]) -> Dataset:
    """As many images as the limit leaves: every n-th in the order of their classes, which
    keep their shares."""
    count = limit(len(dataset))
    if count == len(dataset):
        return dataset
    by_class = np.argsort(dataset.labels, kind="stable")
    places = ((np.arange(count) + 0.5) * len(dataset) / count).astype(np.int64)
    return Subset(dataset, np.sort(by_class[places]))


def _normalization(options: keys.Datamodule) -> Normalization:
    mean, std = options.mean, options.std
    if (mean is None) != (std is None):
        raise UserError("datamodule.mean and datamodule.std go together: give both or none")
    if mean is None or std is None:
        is_mnist = options.dataset == "mnist"
        return Normalization(*(_MNIST_STATISTICS if is_mnist else (IMAGENET_MEAN, IMAGENET_STD)))
    try:
        return Normalization(mean, std)
    except ValueError as error:
        raise UserError(
            f"datamodule.{error}; three for color images, one for gray ones such as "
            f"mean {_GRAY_STATISTICS[0]}, std {_GRAY_STATISTICS[1]}"
        ) from error


def _arrangement(shuffle: bool, repeats: int) -> Arrangement:
    arrangement: Arrangement = RepeatedAugmentation(repeats) if repeats > 1 else each_once
    if shuffle:
        return arrangement

    def in_order(
        permutation: np.ndarray, batch_size: int, rank: int, world_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return arrangement(np.sort(permutation), batch_size, rank, world_size)

    return in_order
