"""Where training, validation and test images come from: folders, archives, MNIST, noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oneflow_accel.errors import DataError, UserError
from oneflow_accel.training.image_reader import Dataset
from oneflow_accel.training.images import ImageFolder, SyntheticImages
from oneflow_accel.training.splits import split

from monarch_flow.data.archive import ArchiveImages, is_archive
from monarch_flow.data.mnist import MnistImages

# What is held out for validation where the data set has no such part and nothing is said: of
# MNIST's training images a number, of a flat folder a share.
MNIST_VAL_SPLIT = 5000
FLAT_VAL_SPLIT = 0.1
_MNIST_SIZE = 28
# Up to here MNIST's images get a border, beyond they are enlarged.
_MNIST_MOST_PADDED = 36
_SYNTHETIC_CLASSES = 1000


@dataclass(frozen=True)
class Parts:
    """The three parts of a data set.

    Attributes:
        train: what is trained on.
        val: what each epoch is validated on.
        test: what the end is tested on.
        num_classes: of the labels.
        exact_size: the images have the wanted size already.
    """

    train: Dataset
    val: Dataset
    test: Dataset
    num_classes: int
    exact_size: bool = False


def folder_parts(data_dir: Path, val_split: float | None, seed: int) -> Parts:
    """A folder or an archive (.tar, .zip) with `train/CLASS/...`, `val/CLASS/...` and maybe
    `test/CLASS/...`; without `test` the validation images are it. Or a folder of class folders
    only, of which a part is held out for validation and test.

    Args:
        data_dir: the folder or the archive.
        val_split: of a folder of class folders, what to hold out: a number, or a share below 1.
        seed: of that choice.

    Raises:
        DataError: it is not there, a part is missing or empty, or train and val have other classes.
        UserError: `val_split` does not fit.
    """
    if is_archive(data_dir):
        archive = ArchiveImages.open(data_dir)
        train, val = archive.part("train"), archive.part("val")
        _require_same_classes(train, val)
        test = archive.part("test") if archive.has("test") else val
        return Parts(train, val, test, len(train.classes))
    if (data_dir / "train").is_dir() or (data_dir / "val").is_dir():
        for name in ("train", "val"):
            if not (data_dir / name).is_dir():
                raise DataError(
                    f"{data_dir} has no folder '{name}'; expected {data_dir}/train/CLASS/IMAGE and "
                    f"{data_dir}/val/CLASS/IMAGE"
                )
        if val_split is not None:
            raise UserError(
                f"datamodule.val_split is {val_split:g}, but {data_dir} has a folder 'val'; leave "
                "val_split out"
            )
        train_folder, val_folder = ImageFolder(data_dir / "train"), ImageFolder(data_dir / "val")
        _require_same_classes(train_folder, val_folder)
        test_folder = val_folder
        if (data_dir / "test").is_dir():
            test_folder = ImageFolder(data_dir / "test")
            _require_same_classes(train_folder, test_folder)
        return Parts(train_folder, val_folder, test_folder, len(train_folder.classes))
    flat = ImageFolder(data_dir)
    held_out = _held_out(FLAT_VAL_SPLIT if val_split is None else val_split, len(flat))
    if held_out == 0:
        raise UserError(f"datamodule.val_split is 0 and {data_dir} has no folder 'val'")
    left, out = split(flat, held_out, seed)
    return Parts(left, out, out, len(flat.classes))


def mnist_parts(data_dir: Path, image_size: int, val_split: float | None, seed: int) -> Parts:
    """MNIST's training images, of which some are held out for validation, and its test images.

    Args:
        data_dir: see MnistImages.
        image_size: images get a black border up to this size if it is 28 to 36; else they stay as
            they are and the transform resizes them.
        val_split: what to hold out, a number or a share below 1; 0 trains on all 60,000 and
            validates on the test images. None is 5,000.
        seed: of that choice.

    Raises:
        DataError: as MnistImages.
        UserError: `val_split` does not fit.
    """
    pads = _MNIST_SIZE <= image_size <= _MNIST_MOST_PADDED
    train = MnistImages(data_dir, "train", pad_to=image_size if pads else None)
    test = MnistImages(data_dir, "test", pad_to=image_size if pads else None)
    held_out = _held_out(MNIST_VAL_SPLIT if val_split is None else val_split, len(train))
    classes = len(train.classes)
    if held_out == 0:
        return Parts(train, test, test, classes, exact_size=pads)
    left, out = split(train, held_out, seed)
    return Parts(left, out, test, classes, exact_size=pads)


def synthetic_parts(
    image_size: int, channels: int, num_images: int, num_classes: int | None, seed: int
) -> Parts:
    """Noise of the wanted size, which no transform touches; validation has a quarter as many
    images."""
    shape = (image_size, image_size, channels)
    classes = num_classes or _SYNTHETIC_CLASSES
    train = SyntheticImages(num_images, shape, classes, seed)  # type: ignore[arg-type]
    val = SyntheticImages(max(num_images // 4, 1), shape, classes, seed + 1)  # type: ignore[arg-type]
    return Parts(train, val, val, classes, exact_size=True)


def _held_out(val_split: float, images: int) -> int:
    count = round(val_split * images) if 0 < val_split < 1 else int(val_split)
    fits = count == val_split or 0 < val_split < 1
    if val_split < 0 or not fits or not (val_split == 0 or 0 < count < images):
        raise UserError(
            f"datamodule.val_split is {val_split:g} of {images} images; give a number of images "
            "below that, or a share between 0 and 1"
        )
    return count


def _require_same_classes(
    train: ImageFolder | ArchiveImages, other: ImageFolder | ArchiveImages
) -> None:
    if train.classes == other.classes:
        return
    missing = sorted(set(train.classes) ^ set(other.classes))
    raise DataError(
        f"{train.root} has {len(train.classes)} classes and {other.root} {len(other.classes)}; "
        f"only one of them has {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. "
        "Their class folders have to be the same"
    )
