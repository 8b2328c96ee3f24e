"""Where training, validation and test images come from: folders, archives, MNIST, noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oneflow_accel.errors import DataError, UserError

from flow_train.data.archive import ArchiveImages, is_archive
from flow_train.data.image_reader import Dataset
from flow_train.data.images import ImageFolder, SyntheticImages
from flow_train.data.mnist import MnistImages
from flow_train.data.splits import split

# The folder with the validation images: the first of these that is there.
VALIDATION_NAMES = ("val", "validation")
# What is held out for validation by default where the data set has no such part: a number of
# MNIST's training images, a share of a flat folder.
MNIST_VAL_SPLIT = 5000
FLAT_VAL_SPLIT = 0.1
_MNIST_SIZE = 28
# Up to this size MNIST's images get a border, above it they are enlarged.
_MNIST_MOST_PADDED = 36
_SYNTHETIC_CLASSES = 1000

Classified = ImageFolder | ArchiveImages


@dataclass(frozen=True)
class Parts:
    """The three parts of a data set; `train` is None where nothing is trained on, and `exact_size`
    says that the images have the wanted size already."""

    train: Dataset | None
    val: Dataset
    test: Dataset
    num_classes: int
    exact_size: bool = False


def folder_parts(
    data_dir: Path,
    val_split: float | None,
    seed: int,
    *,
    training: bool = True,
    classes: Sequence[str] | None = None,
    allow_empty: bool = False,
) -> Parts:
    """A folder or an archive (.tar, .zip) with `train/CLASS/...`, `val/CLASS/...` (or
    `validation/CLASS/...`) and maybe `test/CLASS/...`; without `test` the validation images are it.
    Or a folder of class folders only, of which `val_split` (a number, or a share below 1) is held
    out for validation and test.

    `training=False` leaves out the training images, which need not be there then; `classes` and
    `allow_empty` are as for `ImageFolder`. DataError if a part is missing or empty, or train and
    val have other classes; UserError if `val_split` does not fit.
    """
    if is_archive(data_dir):
        archive = ArchiveImages.open(data_dir)
        return _named_parts(archive.has, lambda name: archive.part(name, classes), training)
    if any((data_dir / name).is_dir() for name in ("train", *VALIDATION_NAMES)):
        val_name = _validation_folder(data_dir, training)
        if val_split is not None:
            raise UserError(
                f"datamodule.val_split is {val_split:g}, but {data_dir} has a folder '{val_name}'; "
                "leave val_split out"
            )
        return _named_parts(
            lambda name: (data_dir / name).is_dir(),
            lambda name: ImageFolder(data_dir / name, classes, allow_empty=allow_empty),
            training,
        )
    if data_dir.is_dir() and not any(path.is_dir() for path in data_dir.iterdir()):
        raise DataError(
            f"{data_dir} has no folders in it; expected {'train/CLASS/IMAGE and ' * training}"
            "val/CLASS/IMAGE, or CLASS/IMAGE alone"
        )
    flat = ImageFolder(data_dir, classes, allow_empty=allow_empty)
    held_out = _held_out(FLAT_VAL_SPLIT if val_split is None else val_split, len(flat))
    if held_out == 0:
        raise UserError(f"datamodule.val_split is 0 and {data_dir} has no folder 'val'")
    left, out = split(flat, held_out, seed)
    return Parts(left, out, out, len(flat.classes))


def _validation_folder(data_dir: Path, training: bool) -> str:
    found = next((name for name in VALIDATION_NAMES if (data_dir / name).is_dir()), None)
    has_train = not training or (data_dir / "train").is_dir()
    if found is None or not has_train:
        expected = f"{data_dir}/train/CLASS/IMAGE and " if training else ""
        raise DataError(
            f"{data_dir} has no folder '{'val' if has_train else 'train'}'; expected "
            f"{expected}{data_dir}/val/CLASS/IMAGE"
        )
    return found


def _named_parts(
    has: Callable[[str], bool], read: Callable[[str], Classified], training: bool
) -> Parts:
    train = read("train") if training else None
    val = read(next((name for name in VALIDATION_NAMES if has(name)), VALIDATION_NAMES[0]))
    if train is not None:
        _require_same_classes(train, val)
    test = read("test") if has("test") else val
    if test is not val:
        _require_same_classes(val, test)
    return Parts(train, val, test, len(val.classes))


def mnist_parts(
    data_dir: Path, image_size: int, val_split: float | None, seed: int, *, training: bool = True
) -> Parts:
    """MNIST's training images, of which `val_split` (a number, or a share below 1; None is 5,000)
    are held out for validation, and its test images. With 0 all 60,000 are trained on and the test
    images validate.

    Images get a black border up to an `image_size` of 28 to 36; else the transform resizes them.
    `training=False` leaves out the training images, which need not be there if none of them
    validate. Errors are those of MnistImages, and UserError if `val_split` does not fit.
    """
    pads = _MNIST_SIZE <= image_size <= _MNIST_MOST_PADDED
    pad_to = image_size if pads else None
    if val_split == 0 and not training:
        test = MnistImages(data_dir, "test", pad_to)
        return Parts(None, test, test, len(test.classes), exact_size=pads)
    train, test = (MnistImages(data_dir, part, pad_to) for part in ("train", "test"))
    classes = len(train.classes)
    held_out = _held_out(MNIST_VAL_SPLIT if val_split is None else val_split, len(train))
    if held_out == 0:
        return Parts(train, test, test, classes, exact_size=pads)
    left, out = split(train, held_out, seed)
    return Parts(left, out, test, classes, exact_size=pads)


def synthetic_parts(
    image_size: int, channels: int, num_images: int, num_classes: int | None, seed: int
) -> Parts:
    """Noise of the wanted size, which no transform touches; a quarter as many for validation."""
    shape = (image_size, image_size, channels)
    classes = num_classes or _SYNTHETIC_CLASSES
    train = SyntheticImages(num_images, shape, classes, seed)
    val = SyntheticImages(max(num_images // 4, 1), shape, classes, seed + 1)
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


def _require_same_classes(train: Classified, other: Classified) -> None:
    if train.classes == other.classes:
        return
    missing = sorted(set(train.classes) ^ set(other.classes))
    raise DataError(
        f"{train.root} has {len(train.classes)} classes and {other.root} {len(other.classes)}; "
        f"only one of them has {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. "
        "Their class folders have to be the same"
    )
