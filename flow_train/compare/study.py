"""A study: the runs that are compared, each an experiment with a few changes, as a YAML file; and
what the program is called with for each of them, checked before any runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from oneflow_accel.errors import UserError, did_you_mean, nearest
from oneflow_accel.precision import canonical

import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import Field, ValidationError

from flow_train.compare.process import noted
from flow_train.config.compose import Composer, parse_override
from flow_train.config.files import config_differences, load_config
from flow_train.config.schema import Group, Text
from flow_train.files import replace_file

# The form of names, as they become folders.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The file in the folder of a run that has ended well.
_FINISHED = "finished.json"
# The keys that the study itself decides, and why nobody else can.
_OURS = {
    "experiment": "the study's rows name them",
    "name": "a run is called after its study and row",
    "run_dir": "all runs of a study are in one folder; choose where with work_dir=DIR",
    "resume": "a run that was interrupted always goes on",
    "mode": "a study's runs are whole ones; for short ones give trainer.max_epochs=1",
    "eval.ckpt": "runs are trained and then tested",
    "trainer.fast_dev_run": "it writes nothing; for short runs give trainer.max_steps=10",
    "trainer.profile": "it trains nothing to the end; profile a single run",
}
# Keys that do not change what a run computes, or that follow from where its folder is.
_FREE = (
    "resume",
    "work_dir",
    "run_dir",
    "verbose",
    "eval.",
    "logger.",
    "train.init_from.path",
    "datamodule.data_dir",
    "datamodule.num_workers",
    "datamodule.pin_memory",
    "trainer.log_every_n_steps",
)
_ABSENT = object()


class Row(Group):
    """One run of a study, one row of its table; `overrides` are the keys that are different here.
    `init_from` is the row above this one whose best weights the run starts with; the table then
    says what the accuracy was before the first step."""

    name: Text
    experiment: Text
    overrides: list[str] = Field(default_factory=list)
    init_from: Text | None = None


class Study(Group):
    """What a study's file says: `overrides` are different in all rows; the first of `rows` is what
    the others are compared with. Each row is run once with each of `seeds`, where there are any."""

    name: Text = ""
    title: Text
    overrides: list[str] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=list)
    rows: Annotated[list[Row], Field(min_length=1)]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: the program's arguments, its folder, the device that it asks for, the run
    whose weights it starts with, and which of the study's seeds it has."""

    row: Row
    arguments: tuple[str, ...]
    folder: Path
    device: str | None = None
    source: PlannedRun | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        return run_name(self.row.name, self.seed)

    @property
    def finished(self) -> dict[str, Any]:
        """What `finish` noted, empty where the run has not ended yet."""
        return noted(self.folder / _FINISHED)

    def finish(self, device: str) -> None:
        """Note that the run has ended well, on which device, and when; OSError if that cannot be
        written."""
        today = datetime.now().astimezone().date().isoformat()
        content = json.dumps({"device": device, "date": today})
        replace_file(self.folder / _FINISHED, content.encode())


@dataclass(frozen=True)
class Studies:
    """The studies of a program: files in the folder `name` beside the groups of its `composer`.
    `module` is the program, as `python -m` takes it; `check` raises UserError for a configuration
    that cannot run, such as one without data."""

    composer: Composer
    module: str
    check: Callable[[DictConfig], None]
    name: str = "study"

    def files(self, config_dir: str | None = None) -> dict[str, Path]:
        """The files of all studies by name, sorted; `config_dir` may have further ones."""
        roots = [self.composer.configs]
        roots += [] if config_dir is None else [Path(config_dir).expanduser()]
        files = [file for root in roots for file in (root / self.name).glob("*.yaml")]
        return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}

    def read(self, name: str, config_dir: str | None = None) -> Study:
        """Read a study by its file's name without suffix, or by a path that ends in .yaml;
        `config_dir` may have further groups and studies. UserError if there is none (names the
        nearest), or names the wrong key in it."""
        return read_study(self._find(name, config_dir))

    def plan(
        self, study: Study, overrides: Sequence[str], config_dir: str | None = None
    ) -> list[PlannedRun]:
        """The runs of a study, in its order; `overrides` win over those of the study and of its
        rows. UserError names the row that cannot be composed, lacks its data, or was begun with
        other values."""
        runs: dict[tuple[str | None, int | None], PlannedRun] = {}
        seeds: list[int] | list[None] = study.seeds or [None]
        for row, seed in itertools.product(study.rows, seeds):
            try:
                source = runs.get((row.init_from, seed))
                run = self._planned(study, row, source, seed, overrides, config_dir)
            except UserError as error:
                raise UserError(f"{row.name}: {error}") from error
            runs[row.name, seed] = run
        return list(runs.values())

    def _find(self, name: str, config_dir: str | None) -> Path:
        if name.endswith(".yaml"):
            if not Path(name).is_file():
                raise UserError(f"there is no file {name}")
            return Path(name)
        known = self.files(config_dir)
        if name not in known:
            near = nearest(name.replace("/", "-"), known, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"there is no study {name}; {hint}there are {', '.join(known)}, or give the path "
                "of a file that ends in .yaml"
            )
        return known[name]

    def _planned(
        self,
        study: Study,
        row: Row,
        source: PlannedRun | None,
        seed: int | None,
        overrides: Sequence[str],
        config_dir: str | None,
    ) -> PlannedRun:
        chosen = _merged(self.composer.example, *study.overrides, *row.overrides, *overrides)
        for key, text in chosen.items():
            if key in _OURS:
                raise UserError(f"{text}: {_OURS[key]}")
            if source is not None and key == "train.init_from.path":
                raise UserError(f"{text}: it starts with the weights of {row.init_from}")
            if seed is not None and key == "seed":
                raise UserError(f"{text}: the study's seeds are {study.seeds}")
        below, name = f"${{work_dir}}/studies/{study.name}", run_name(row.name, seed)
        texts = [f"experiment={row.experiment}", *chosen.values()]
        texts += [] if seed is None else [f"seed={seed}"]
        texts += [f"name={study.name}-{name}", f"run_dir={below}/{name}", "resume=auto"]
        if source is not None:
            texts.append(f"train.init_from.path={below}/{source.name}")
            texts.append("callbacks.initial_validation={}")
        flags = [] if config_dir is None else ["--config-dir", config_dir]
        cfg = self.composer.compose(texts, config_dir)
        self.check(cfg)
        folder = Path(cfg.run_dir)
        _check_begun(cfg, folder)
        return PlannedRun(row, (*flags, *texts), folder, cfg.trainer.accelerator, source, seed)


def run_name(row: str, seed: int | None) -> str:
    return row if seed is None else f"{row}-seed{seed}"


def read_study(path: Path) -> Study:
    """UserError for a file that is not a study; names the wrong key in it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a study, which has the keys {_keys(Study)}")
    try:
        study = Study.model_validate({"name": path.stem, **values})
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {text}" for text in _problems(error))) from error
    _check_names(study, path)
    return study


def split_arguments(study: Study, texts: Sequence[str]) -> tuple[Study, list[str]]:
    """The study with the seeds of a `seeds=1,2,3` among KEY=VALUE texts, and the other texts.
    UserError for seeds that are not whole numbers."""
    others = []
    for text in texts:
        key, _, value = text.partition("=")
        if key != "seeds":
            others.append(text)
            continue
        try:
            study = study.model_copy(update={"seeds": list(map(int, value.split(",")))})
        except ValueError:
            raise UserError(f"{text}: whole numbers, such as seeds=1,2,3") from None
    return study, others


def _merged(example: str, *texts: str) -> dict[str, str]:
    """Overrides by key; of two for one key the later one stays, in the later one's place."""
    merged: dict[str, str] = {}
    for text in texts:
        key = parse_override(text, example).key_or_group
        merged.pop(key, None)
        merged[key] = text
    return merged


def _check_begun(cfg: DictConfig, folder: Path) -> None:
    """A run that goes on, or that is not repeated, must be the one that is asked for."""
    saved = load_config(folder)
    if saved is None:
        return
    changed = [
        f"{key} is {new}, and {old} there"
        for key, old, new in config_differences(cfg, folder)
        # A key that the old configuration lacks is newer than the run, and changes nothing by
        # itself.
        if OmegaConf.select(saved, key, default=_ABSENT) is not _ABSENT
        and not key.startswith(_FREE)
        and not _settled(key, old, new)
    ]
    if changed:
        raise UserError(
            f"{folder} holds a run with other values: {'; '.join(changed)}. Remove that "
            "folder, or choose another one with work_dir=DIR"
        )


def _settled(key: str, old: Any, new: Any) -> bool:
    """Whether the engine has put another value into the run's file than it was given."""
    return key == "trainer.precision" and canonical(old) == "float32" != canonical(new)


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        *above, last = [str(part) for part in problem["loc"]]
        key = ".".join([*above, last])
        model = Row if "rows" in above else Study
        if problem["type"] == "extra_forbidden":
            otherwise = f"there are {_keys(model)}"
            hint = did_you_mean(last, model.model_fields, otherwise, cutoff=0.5)
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
