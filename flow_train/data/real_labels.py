"""Reassessed ("real") labels of ImageNet's validation images: several per image, one, or none.

Beyer et al. 2020, "Are we done with ImageNet?", publish them as a JSON file, `real.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from oneflow_accel.errors import DataError, UserError

import numpy as np

_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")
_PUBLISHED = (
    "the file is published with the paper, at github.com/google-research/reassessed-imagenet"
)


class RealLabels:
    """For each image of a data set, in its order, its class indices. An image without one is not
    counted (section 4 of the paper)."""

    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        self._labels = [frozenset(classes) for classes in labels]

    def __len__(self) -> int:
        return len(self._labels)

    def count(self, indices: np.ndarray, best: np.ndarray) -> tuple[int, int, int]:
        """How many predictions are among an image's labels.

        `indices` are int64 (N,), positions in the data set; `best` is int (N, k), the predicted
        classes, the likeliest first. Returns how many of the images have a label, for how many of
        those the first prediction is one, and for how many any of the k is.
        """
        images = first = any_of = 0
        for index, classes in zip(indices.tolist(), best.tolist(), strict=True):
            labels = self._labels[index]
            if labels:
                images += 1
                first += classes[0] in labels
                any_of += not labels.isdisjoint(classes)
        return images, first, any_of


def read_real_labels(
    path: Path | str, file_names: Sequence[str], num_classes: int | None = None
) -> RealLabels:
    """Read the labels of ImageNet's validation images: a JSON list of lists of class indices, whose
    entry i is that of the image called ILSVRC2012_val_{i + 1, 8 digits}.

    `file_names` are those of the data set's images, in its order, with or without folders and
    ending; all that the labels are of, or a part. `num_classes` None does not check the indices.
    UserError if the file is not such a list; DataError if the images are not those of the labels.
    """
    lists = _read_lists(Path(path), num_classes)
    numbers = []
    others = []
    for name in file_names:
        match = _NAME.fullmatch(PurePath(name).stem)
        if match is None:
            others.append(name)
        else:
            numbers.append(int(match[1]))
    wanted = (
        f"the labels in {path} are those of the {len(lists)} files ILSVRC2012_val_00000001.JPEG to "
        f"ILSVRC2012_val_{len(lists):08d}.JPEG"
    )
    if others:
        raise DataError(
            f"{wanted}, and {len(others)} of the {len(file_names)} validation images have another "
            f"name, such as {others[0]}; leave the real labels out, or validate on those files"
        )
    once = set(numbers)
    strange = sorted(number for number in once if not 1 <= number <= len(lists))
    if strange or len(once) != len(numbers) or not numbers:
        told = f" number {strange[0]} is not among them;" if strange else ""
        told = told or (" one is there more than once;" if numbers else "")
        raise DataError(
            f"{wanted}, and there are {len(numbers)} validation images;{told} leave the real "
            "labels out, or validate on those files"
        )
    return RealLabels([lists[number - 1] for number in numbers])


def _read_lists(path: Path, num_classes: int | None) -> list[list[int]]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read the real labels {path}: {error.strerror or error}; {_PUBLISHED}"
        ) from error
    # Brackets nested without end raise the RecursionError.
    except (ValueError, RecursionError) as error:
        raise UserError(f"the real labels {path} are no JSON: {error}; {_PUBLISHED}") from error
    if not isinstance(content, list) or not content:
        raise UserError(
            f"the real labels {path} are not a list with a list of classes for each image; "
            f"{_PUBLISHED}"
        )
    for number, classes in enumerate(content, 1):
        if not isinstance(classes, list) or not all(map(_is_class, classes)):
            raise UserError(
                f"the real labels {path}: entry {number} is not a list of class indices, but "
                f"{str(classes)[:60]!r}"
            )
        if num_classes is not None and classes and max(classes) >= num_classes:
            raise UserError(
                f"the real labels {path} name class {max(classes)}, and there are {num_classes}: "
                "they are for data with ImageNet's 1000 classes"
            )
    return content


def _is_class(value: Any) -> bool:
    return type(value) is int and value >= 0
