"""All classes of a model by name, for data that has images of only a part of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import DataError, UserError


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
