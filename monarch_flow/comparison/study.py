"""A study: the runs that are compared, each an experiment with a few changes, as a YAML file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any

from oneflow_accel.errors import UserError

import yaml
from pydantic import Field, ValidationError

from flow_train.config.schema import Group, Text
from monarch_flow.config import CONFIGS, STUDY

# Names become folders.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Row(Group):
    """One run of a study, one row of its table.

    Attributes:
        name: of the row, and of the run's folder.
        experiment: what is trained, such as "mnist/vit-monarch".
        overrides: keys of the configuration that are different here.
        init_from: the row, above this one, whose best weights the run starts with; the table then
            says what the accuracy was before the first step.
    """

    name: Text
    experiment: Text
    overrides: list[str] = Field(default_factory=list)
    init_from: Text | None = None


class Study(Group):
    """What a study's file says.

    Attributes:
        name: of the study, and of its folder; by default the file's.
        title: of the table and the picture.
        overrides: keys of the configuration that are different in all rows.
        rows: the runs, in the order they are trained in; the first is what others are compared
            with.
    """

    name: Text = ""
    title: Text
    overrides: list[str] = Field(default_factory=list)
    rows: Annotated[list[Row], Field(min_length=1)]


def read_study(name: str, config_dir: str | None = None) -> Study:
    """Read a study.

    Args:
        name: a file in configs/study or DIR/study without its suffix, or a path that ends in .yaml.
        config_dir: DIR.

    Raises:
        UserError: there is no such study (names the nearest), or its file is wrong; names the key.
    """
    path = _find(name, config_dir)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is no study; it is to have the keys {_keys(Study)}")
    try:
        study = Study.model_validate({"name": path.stem, **values})
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {text}" for text in _problems(error))) from error
    _check_names(study, path)
    return study


def studies(config_dir: str | None = None) -> dict[str, Path]:
    """The files of all studies by name, sorted."""
    files = [file for folder in _folders(config_dir) for file in folder.glob("*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def _folders(config_dir: str | None) -> list[Path]:
    roots = [CONFIGS] if config_dir is None else [CONFIGS, Path(config_dir).expanduser()]
    return [root / STUDY for root in roots]


def _find(name: str, config_dir: str | None) -> Path:
    if name.endswith(".yaml"):
        if not Path(name).is_file():
            raise UserError(f"there is no file {name}")
        return Path(name)
    known = studies(config_dir)
    if name not in known:
        near = difflib.get_close_matches(name.replace("/", "-"), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(
            f"there is no study {name}; {hint}there are {', '.join(known)}, or give the path of a "
            "file that ends in .yaml"
        )
    return known[name]


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        *above, last = [str(part) for part in problem["loc"]]
        key = ".".join([*above, last])
        model = Row if "rows" in above else Study
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(last, model.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {_keys(model)}"
            lines.append(f"there is no key {key}; {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{key} is not set")
        else:
            lines.append(f"{key}: {problem['msg']}")
    return lines


def _keys(model: type[Group]) -> str:
    return ", ".join(model.model_fields)


def _check_names(study: Study, path: Path) -> None:
    above: list[str] = []
    for number, row in enumerate(study.rows):
        where = f"{path}: rows.{number}"
        _check_name(row.name, f"{where}.name")
        if row.name in above:
            raise UserError(f"{where}.name: there is a row {row.name} above")
        if row.init_from is not None and row.init_from not in above:
            raise UserError(
                f"{where}.init_from={row.init_from}: there is no such row above it; it can be "
                f"{' or '.join(above) or 'set from the second row on'}"
            )
        above.append(row.name)
    _check_name(study.name, f"{path}: name")


def _check_name(name: Any, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{where}={name}: it is the name of a folder: letters, digits, dots, dashes and "
            "underscores, the first a letter or a digit"
        )
