"""The images of a run, as its configuration describes them: three loaders, the same on any number
of processes and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np

from flow_train.data.augment import build_eval_transform, build_train_transform
from flow_train.data.class_map import read_class_map
from flow_train.data.image_reader import Arrangement, Dataset, each_once
from flow_train.data.images import Batch, ImageLoader
from flow_train.data.mixup import MixBatch, build_mixup
from flow_train.data.parts import Parts, folder_parts, mnist_parts, synthetic_parts
from flow_train.data.repeated_augment import RepeatedAugmentation
from flow_train.data.splits import Subset
from flow_train.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalization,
    Transform,
)

DATASETS = ("folder", "mnist", "synthetic")
# Of the images in the range 0 to 1. Gray photos: the mean over ImageNet's channels.
_MNIST_STATISTICS = ((0.1307,), (0.3081,))
_GRAY_STATISTICS = ((0.449,), (0.226,))

logger = logging.getLogger("oneflow_accel")


class KeptLoader:
    """A loader of evaluation images that keeps what it has read, for small sets read again and
    again."""

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
        # Only here: whoever stops earlier has not seen all.
        self._batches = batches
        self._loader.close()

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Does nothing: evaluation is the same in every epoch, and begins at its beginning."""

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()


class ImageDataModule:
    """Loaders of training, validation and test images.

    Args:
        data_dir: the data: a folder or a .tar or .zip with `train/CLASS/...` and `val/CLASS/...`
            (`test/...` too, if there is one), a folder of class folders, or one with MNIST's files.
            Not used by synthetic images.
        dataset: "folder", "mnist" or "synthetic" (noise that needs no disk, for measurements).
        image_size: height and width of the images, in pixels.
        batch_size: training images per process and step.
        batch_size_eval: the same for validation and test; None for `batch_size`.
        num_workers: processes that read images, per process; 0 for none.
        mixup: see `mixup.build_mixup`; applied to training batches only. None for none.
        num_aug_repeats: how often an image comes in a row, augmented anew each time; 0 and 1 are
            once.
        seed: of order, augmentation, mixing and splits.
        train_transforms: see `transforms.build_train_transform`.
        val_transforms: see `transforms.build_eval_transform`.
        test_transforms: the same; None for `val_transforms`.
        mean: per channel, range 0 to 1; one value makes the images gray. None for ImageNet's, or
            MNIST's.
        std: as many.
        val_split: what to hold out for validation, where the data has no such part: a number of
            images, or a share below 1. None for 5,000 of MNIST and a tenth of a folder; 0 with
            MNIST trains on all 60,000 and validates on the test images.
        shuffle: False trains in the order of the data set.
        cache_val_dataset: keep the transformed validation images in memory.
        num_images: of the synthetic training images.
        num_classes: of the synthetic images; of other data it is checked.
        class_map: of folders that are a part of a model's classes, all of them in their order: see
            `class_map.read_class_map`. None takes the folders for all.
        allow_empty: class folders without images are no mistake, and keep their class's number.
        drop_last: training always leaves out what does not fill a global batch; False warns.
        pin_memory: taken and of no effect, batches are in ordinary memory.
        rank: of this process; None asks oneflow.
        world_size: number of processes; None asks oneflow.
        training: False leaves out the training images, which need not be there then, and
            `train_loader`.
        limit_eval: how many of so many validation or test images are used; they are spread evenly
            over the data set, and so over its classes. None uses all.

    Attributes:
        num_classes: of the labels.
        image_shape: (channels, height, width).

    Raises:
        UserError: a wrong argument; a DataError if the data is missing, damaged or too small. The
            text names what to change.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        dataset: str = "folder",
        image_size: int = 224,
        batch_size: int = 32,
        batch_size_eval: int | None = None,
        num_workers: int = 0,
        mixup: Mapping[str, Any] | None = None,
        num_aug_repeats: int = 0,
        seed: int = 0,
        *,
        train_transforms: Mapping[str, Any] | None = None,
        val_transforms: Mapping[str, Any] | None = None,
        test_transforms: Mapping[str, Any] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        val_split: float | None = None,
        shuffle: bool = True,
        cache_val_dataset: bool = False,
        num_images: int = 1024,
        num_classes: int | None = None,
        class_map: str | None = None,
        allow_empty: bool = False,
        drop_last: bool = True,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        training: bool = True,
        limit_eval: Callable[[int], int] | None = None,
    ) -> None:
        for name, value, least in (
            ("image_size", image_size, 1),
            ("batch_size", batch_size, 1),
            ("batch_size_eval", batch_size if batch_size_eval is None else batch_size_eval, 1),
            ("num_workers", num_workers, 0),
            ("num_aug_repeats", num_aug_repeats, 0),
            ("num_images", num_images, 1),
        ):
            if value < least:
                raise UserError(f"datamodule.{name} is {value}; it has to be at least {least}")
        if not drop_last:
            logger.warning(
                "datamodule.drop_last=False: training leaves out what does not fill a global batch "
                "all the same; evaluation leaves out nothing"
            )
        self._normalization = _normalization(dataset, mean, std)
        self._parts = _parts(
            dataset,
            data_dir,
            image_size=image_size,
            channels=self._normalization.channels,
            val_split=val_split,
            num_images=num_images,
            num_classes=num_classes,
            seed=seed,
            training=training,
            class_map=class_map,
            allow_empty=allow_empty,
        )
        if limit_eval is not None:
            parts = self._parts
            val = _spread(parts.val, limit_eval)
            test = val if parts.test is parts.val else _spread(parts.test, limit_eval)
            self._parts = replace(parts, val=val, test=test)
        self.num_classes = self._parts.num_classes
        if num_classes not in (None, self.num_classes):
            raise UserError(
                f"datamodule.num_classes is {num_classes}, {data_dir} has {self.num_classes} "
                "classes; leave it out to take the data's"
            )
        self.image_shape = (self._normalization.channels, image_size, image_size)
        self._batch_sizes = (batch_size, batch_size_eval or batch_size)
        self._workers = num_workers
        self._seed = seed
        self._rank = distributed.rank() if rank is None else rank
        self._world_size = distributed.world_size() if world_size is None else world_size
        self._cache_val = cache_val_dataset
        self._mixup = build_mixup(mixup, self.num_classes)
        self._arrangement = _arrangement(shuffle, num_aug_repeats)
        exact = self._parts.exact_size
        whole = {"crop_pct": 1.0} if dataset == "mnist" else None
        self._train_transform = build_train_transform(
            image_size,
            self._normalization,
            # Digits are not cropped unless that is asked for.
            train_transforms or ({"no_aug": True} if dataset == "mnist" else None),
            exact_size=exact,
        )
        self._eval_transforms = {
            name: build_eval_transform(
                image_size, self._normalization, config or whole, exact_size=exact, name=name
            )
            for name, config in (
                ("val_transforms", val_transforms),
                ("test_transforms", test_transforms or val_transforms),
            )
        }

    def train_loader(self) -> ImageLoader:
        """Training images; `set_epoch` chooses the epoch. Labels are soft with mixup."""
        return self._train_loader

    def val_loader(self) -> ImageLoader | KeptLoader:
        """Validation images, each once."""
        return self._val_loader

    def test_loader(self) -> ImageLoader:
        """Test images, each once."""
        return self._test_loader

    def close(self) -> None:
        """End the worker processes of all loaders; they start again where they are needed."""
        for name in ("_train_loader", "_val_loader", "_test_loader"):
            if name in self.__dict__:
                self.__dict__[name].close()

    @cached_property
    def _train_loader(self) -> ImageLoader:
        train = self._parts.train
        if train is None:
            raise ValueError("an ImageDataModule with training=False has no training images")
        finish = None
        if self._mixup is not None:
            finish = MixBatch(self._mixup, self._seed, self._rank)
        return self._loader(
            train,
            self._train_transform,
            train=True,
            arrangement=self._arrangement,
            finish=finish,
        )

    @cached_property
    def _val_loader(self) -> ImageLoader | KeptLoader:
        loader = self._loader(self._parts.val, self._eval_transforms["val_transforms"], train=False)
        return KeptLoader(loader) if self._cache_val else loader

    @cached_property
    def _test_loader(self) -> ImageLoader:
        return self._loader(self._parts.test, self._eval_transforms["test_transforms"], train=False)

    def _loader(
        self, dataset: Dataset, transform: Transform, *, train: bool, **options: Any
    ) -> ImageLoader:
        return ImageLoader(
            dataset,
            batch_size=self._batch_sizes[0 if train else 1],
            transform=transform,
            workers=self._workers,
            seed=self._seed,
            train=train,
            rank=self._rank,
            world_size=self._world_size,
            **options,
        )


def _spread(dataset: Dataset, limit: Callable[[int], int]) -> Dataset:
    """As many images as the limit leaves: every n-th of them in the order of their classes, whose
    shares they keep."""
    count = limit(len(dataset))
    if count == len(dataset):
        return dataset
    by_class = np.argsort(dataset.labels, kind="stable")
    places = ((np.arange(count) + 0.5) * len(dataset) / count).astype(np.int64)
    return Subset(dataset, np.sort(by_class[places]))


def _normalization(
    dataset: str, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Normalization:
    if (mean is None) != (std is None):
        raise UserError("datamodule.mean and datamodule.std go together: give both or none")
    if mean is None or std is None:
        is_mnist = dataset == "mnist"
        mean, std = _MNIST_STATISTICS if is_mnist else (IMAGENET_MEAN, IMAGENET_STD)
    try:
        return Normalization(mean, std)
    except ValueError as error:
        raise UserError(
            f"datamodule.{error}; three for color images, one for gray ones such as "
            f"mean {_GRAY_STATISTICS[0]}, std {_GRAY_STATISTICS[1]}"
        ) from error


def _parts(
    dataset: str,
    data_dir: str | Path | None,
    *,
    image_size: int,
    channels: int,
    val_split: float | None,
    num_images: int,
    num_classes: int | None,
    seed: int,
    training: bool,
    class_map: str | None,
    allow_empty: bool,
) -> Parts:
    if dataset not in DATASETS:
        raise UserError(f"datamodule.dataset is '{dataset}'; there are {', '.join(DATASETS)}")
    if dataset != "folder" and (class_map is not None or allow_empty):
        raise UserError(
            "datamodule.class_map and datamodule.allow_empty are for folders of classes, and "
            f"dataset={dataset} has none; leave them out"
        )
    if dataset == "synthetic":
        return synthetic_parts(image_size, channels, num_images, num_classes, seed)
    if data_dir is None:
        raise UserError(
            f"datamodule.data_dir is not set; give the folder of the data (dataset={dataset})"
        )
    if dataset == "mnist":
        return mnist_parts(Path(data_dir), image_size, val_split, seed, training=training)
    return folder_parts(
        Path(data_dir),
        val_split,
        seed,
        training=training,
        classes=None if class_map is None else read_class_map(class_map),
        # With all classes named, no number depends on what a folder holds.
        allow_empty=allow_empty or class_map is not None,
    )


def _arrangement(shuffle: bool, repeats: int) -> Arrangement:
    arrangement: Arrangement = RepeatedAugmentation(repeats) if repeats > 1 else each_once
    if shuffle:
        return arrangement

    def in_order(
        permutation: np.ndarray, batch_size: int, rank: int, world_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return arrangement(np.sort(permutation), batch_size, rank, world_size)

    return in_order
