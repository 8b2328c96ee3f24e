"""Where training, validation and test images come from: folders, archives, MNIST, noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel.errors import DataError, UserError

import numpy as np

from flow_train.config import keys
from flow_train.data.archive import ArchiveImages, class_of, images_of, is_archive, list_members
from flow_train.data.image_reader import SPLIT_STREAM, Dataset, ReadsMany
from flow_train.data.images import ImageFolder, SyntheticImages, require_same_classes
from flow_train.data.mnist import MnistImages
from flow_train.data.transforms import Transform

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


def read_parts(options: keys.Datamodule, channels: int, seed: int, *, training: bool) -> Parts:
    """The parts of the data set that `options` describe, in images of so many channels.
    `training=False` leaves out the training images, which need not be there then. DataError if
    something is missing, empty or damaged; UserError if options do not fit it or each other."""
    dataset, size, class_map = options.dataset, options.image_size, options.class_map
    if dataset != "folder" and (class_map is not None or options.allow_empty):
        raise UserError(
            "datamodule.class_map and datamodule.allow_empty are for folders of classes, and "
            f"dataset={dataset} has none; leave them out"
        )
    if dataset == "synthetic":
        # Noise of the wanted size, which no transform touches; a quarter as many for validation.
        shape, classes = (size, size, channels), options.num_classes or _SYNTHETIC_CLASSES
        train = SyntheticImages(options.num_images, shape, classes, seed)
        val = SyntheticImages(max(options.num_images // 4, 1), shape, classes, seed + 1)
        return Parts(train, val, val, classes, exact_size=True)
    if options.data_dir is None:
        raise UserError(
            f"datamodule.data_dir is not set; give the folder of the data (dataset={dataset})"
        )
    read = _mnist_parts if dataset == "mnist" else _folder_parts
    return read(Path(options.data_dir), options, seed, training)


def _folder_parts(data_dir: Path, options: keys.Datamodule, seed: int, training: bool) -> Parts:
    """A folder or an archive (.tar, .zip) with `train/CLASS/...`, `val/CLASS/...` (or
    `validation/CLASS/...`) and maybe `test/CLASS/...`; without `test` the validation images are it.
    Or a folder of class folders only, of which `val_split` (a number, or a share below 1) is held
    out for validation and test."""
    classes = None if options.class_map is None else read_class_map(options.class_map)
    # With all classes named, their indices do not depend on what a folder holds.
    allow_empty, val_split = options.allow_empty or classes is not None, options.val_split
    if is_archive(data_dir):
        members = list_members(data_dir)
        return _named_parts(
            lambda name: any(class_of(member, name) for member in members),
            lambda name: images_of(data_dir, members, name, classes),
            training,
        )
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
        require_same_classes(train, val)
    test = read("test") if has("test") else val
    if test is not val:
        require_same_classes(val, test)
    return Parts(train, val, test, len(val.classes))


def _mnist_parts(data_dir: Path, options: keys.Datamodule, seed: int, training: bool) -> Parts:
    """MNIST's training images, of which `val_split` (a number, or a share below 1; None is 5,000)
    are held out for validation, and its test images. With 0 all 60,000 are trained on and the test
    images validate: then `training=False` does not read them.

    Images get a black border up to an `image_size` of 28 to 36; else the transform resizes them.
    """
    pads = _MNIST_SIZE <= options.image_size <= _MNIST_MOST_PADDED
    pad_to, val_split = options.image_size if pads else None, options.val_split
    test = MnistImages(data_dir, "test", pad_to)
    classes = len(test.classes)
    if val_split == 0 and not training:
        return Parts(None, test, test, classes, exact_size=pads)
    train = MnistImages(data_dir, "train", pad_to)
    held_out = _held_out(MNIST_VAL_SPLIT if val_split is None else val_split, len(train))
    if held_out == 0:
        return Parts(train, test, test, classes, exact_size=pads)
    left, out = split(train, held_out, seed)
    return Parts(left, out, test, classes, exact_size=pads)


def _held_out(val_split: float, images: int) -> int:
    count = round(val_split * images) if 0 < val_split < 1 else int(val_split)
    fits = count == val_split or 0 < val_split < 1
    if val_split < 0 or not fits or not (val_split == 0 or 0 < count < images):
        raise UserError(
            f"datamodule.val_split is {val_split:g} of {images} images; give a number of images "
            "below that, or a share between 0 and 1"
        )
    return count


class Subset:
    """Some images of a data set, as a data set, in the order of `indices` (int64)."""

    def __init__(self, dataset: Dataset, indices: np.ndarray) -> None:
        self._dataset = dataset
        self._indices = indices
        self.labels = dataset.labels[indices]

    @property
    def root(self) -> Path | str:
        return self._dataset.root

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        return self._dataset.name(int(self._indices[index]))

    def shape(self, transform: Transform) -> tuple[int, ...]:
        return self._dataset.shape(transform)

    def read(self, index: int, transform: Transform, rng: np.random.Generator) -> np.ndarray:
        return self._dataset.read(int(self._indices[index]), transform, rng)

    def read_many(self, indices: np.ndarray, transform: Transform) -> np.ndarray | None:
        """Many transformed images, where the whole data set can give them in one go."""
        if not isinstance(self._dataset, ReadsMany):
            return None
        return self._dataset.read_many(self._indices[indices], transform)


def split(dataset: Dataset, held_out: int, seed: int) -> tuple[Subset, Subset]:
    """Divide a data set at random into what is left and `held_out` images, each in the data set's
    order; the same division for the same seed. Each class gives its share of what is held out, to
    the nearest image, so that a small split has every class."""
    if not 0 < held_out < len(dataset):
        raise ValueError(f"{held_out} of {len(dataset)} images")
    rng = np.random.default_rng((SPLIT_STREAM, seed))
    shuffled = rng.permutation(len(dataset))
    # By class, in a random order inside it; every (images / held_out)-th of that row is held out.
    by_class = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
    places = ((np.arange(held_out) + 0.5) * len(dataset) / held_out).astype(np.int64)
    is_held_out = np.zeros(len(dataset), dtype=bool)
    is_held_out[by_class[places]] = True
    return (
        Subset(dataset, np.flatnonzero(~is_held_out)),
        Subset(dataset, np.flatnonzero(is_held_out)),
    )


def read_class_map(path: str | Path) -> list[str]:
    """The names of class folders in the order of a model's classes.

    `path` is one of
    - a text file with a line for each class, whose first word is the folder's name, such as
      ImageNet's LOC_synset_mapping.txt;
    - a JSON file: a list of names, {"name": index}, or {"index": [name, ...]} as
      imagenet_class_index.json has it;
    - a folder with a folder for each class, such as the whole data set's `train`: sorted names.
    UserError if it cannot be read, is none of these, or names a class twice or not at all.
    """
    path = Path(path)
    try:
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        elif path.suffix == ".json":
            names = _from_json(json.loads(path.read_bytes()))
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            names = [line.split()[0] for line in lines if line.strip()]
    except OSError as error:
        raise DataError(
            f"datamodule.class_map={path} cannot be read: {error.strerror or error}"
        ) from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UserError(
            f"datamodule.class_map={path}: neither lines that begin with the name of a folder, nor "
            "a JSON list of names, {name: index} or {index: [name]}, nor a folder of class folders "
            f"({error})"
        ) from error
    twice = sorted({name for name in names if names.count(name) > 1}) if names else []
    if twice or not names:
        told = f"{twice[0]} is there more than once" if twice else "it has no class"
        raise UserError(f"datamodule.class_map={path}: {told}")
    return names


def _from_json(content: Any) -> list[str]:
    if isinstance(content, list):
        return [_name(entry) for entry in content]
    if not isinstance(content, dict):
        raise TypeError(f"it holds {content!r}")
    pairs = [
        (int(value), key) if isinstance(value, int) else (int(key), _name(value))
        for key, value in content.items()
    ]
    numbers = sorted(number for number, _ in pairs)
    if numbers != list(range(len(pairs))):
        raise ValueError(f"the indices are not 0 to {len(pairs) - 1}")
    return [name for _, name in sorted(pairs)]


def _name(entry: Any) -> str:
    name = entry if isinstance(entry, str) else entry[0]
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a name")
    return name
