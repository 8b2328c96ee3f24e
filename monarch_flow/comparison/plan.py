"""What `monarch_flow.train` is called with for each row of a study, checked before any runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf

from flow_train.config.files import config_differences, load_config
from flow_train.config.overrides import parse_override
from flow_train.files import replace_file
from monarch_flow.comparison.study import Row, Study
from monarch_flow.config import COMPOSER, check_data_dir, compose

# In the folder of a run that has ended well.
_FINISHED = "finished.json"
# What a study decides, and why nobody else can.
_OURS = {
    "experiment": "the study's rows name them",
    "name": "a run is called after its study and row",
    "run_dir": "all runs of a study are in one folder; choose where with work_dir=DIR",
    "resume": "a run that was interrupted always goes on",
    "mode": "a study's runs are whole ones; for short ones give trainer.max_epochs=1",
    "eval.ckpt": "runs are trained and then tested",
    "trainer.fast_dev_run": "it writes nothing; for short runs give trainer.max_steps=10",
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


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        row: what it is.
        arguments: of `monarch_flow.train`.
        cfg: what they compose to.
        source: the run whose weights it starts with.
    """

    row: Row
    arguments: tuple[str, ...]
    cfg: DictConfig
    source: PlannedRun | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.cfg.run_dir)

    @property
    def finished(self) -> dict[str, Any] | None:
        """What `finish` noted, None where the run has not ended yet."""
        try:
            noted = json.loads((self.folder / _FINISHED).read_bytes())
        except (OSError, ValueError):
            return None
        return dict(noted)

    def finish(self, device: str) -> None:
        """Note that the run has ended well, on which device, and when.

        Raises:
            OSError: its folder cannot be written to.
        """
        noted = {"device": device, "date": datetime.now().astimezone().date().isoformat()}
        replace_file(self.folder / _FINISHED, json.dumps(noted).encode())


def plan(study: Study, overrides: Sequence[str], config_dir: str | None = None) -> list[PlannedRun]:
    """The runs of a study, in its order.

    Args:
        study: what to run.
        overrides: for all of them; they win over those of the study and of its rows.
        config_dir: a folder with further options of the groups, see `monarch_flow.config.compose`.

    Raises:
        UserError: a row cannot be composed, the data is not there, or a run was begun with other
            values. Says of which row.
    """
    runs: dict[str, PlannedRun] = {}
    for row in study.rows:
        try:
            run = _planned(study, row, overrides, config_dir, runs)
            check_data_dir(run.cfg)
            _check_begun(run)
        except UserError as error:
            raise UserError(f"{row.name}: {error}") from error
        runs[row.name] = run
    return list(runs.values())


def _planned(
    study: Study,
    row: Row,
    overrides: Sequence[str],
    config_dir: str | None,
    runs: dict[str, PlannedRun],
) -> PlannedRun:
    source = None if row.init_from is None else runs[row.init_from]
    chosen = _merged(*study.overrides, *row.overrides, *overrides)
    for key, text in chosen.items():
        if key in _OURS:
            raise UserError(f"{text}: {_OURS[key]}")
        if source is not None and key == "train.init_from.path":
            raise UserError(f"{text}: it starts with the weights of {row.init_from}")
    below = f"${{work_dir}}/studies/{study.name}"
    texts = [f"experiment={row.experiment}", *chosen.values()]
    texts += [f"name={study.name}-{row.name}", f"run_dir={below}/{row.name}", "resume=auto"]
    if source is not None:
        texts.append(f"train.init_from.path={below}/{row.init_from}")
        texts.append("callbacks.initial_validation={}")
    flags = [] if config_dir is None else ["--config-dir", config_dir]
    return PlannedRun(row, (*flags, *texts), compose(texts, config_dir), source)


def _merged(*texts: str) -> dict[str, str]:
    """Overrides by key; of two for one key the later one stays, in the later one's place."""
    merged: dict[str, str] = {}
    for text in texts:
        key = parse_override(text, COMPOSER.example).key_or_group
        merged.pop(key, None)
        merged[key] = text
    return merged


def _check_begun(run: PlannedRun) -> None:
    """A run that goes on, or that is not repeated, has to be the one that is asked for."""
    saved = load_config(run.folder)
    if saved is None:
        return
    changed = [
        f"{key} is {new}, and {old} there"
        for key, old, new in config_differences(run.cfg, run.folder)
        # What it does not have is newer than it, and changes nothing by itself.
        if OmegaConf.select(saved, key, default=_ABSENT) is not _ABSENT
        and not key.startswith(_FREE)
        and not _settled(key, old, new)
    ]
    if changed:
        raise UserError(
            f"{run.folder} holds a run with other values: {'; '.join(changed)}. Remove that "
            "folder, or choose another one with work_dir=DIR"
        )


def _settled(key: str, old: Any, new: Any) -> bool:
    """Whether the engine has put another value into the run's file than it was given."""
    return key == "trainer.precision" and old == 32 and new in (16, "bf16")
