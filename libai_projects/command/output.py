"""Where a run writes: whether it may and can, what is there already, whether the run to resume is
one of this model, and LiBai's metrics.json."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError

import yaml
from libai.config import try_get_key
from omegaconf import DictConfig, OmegaConf

from flow_train.checkpoint.folders import (
    CURVES_NAME,
    checkpoint_folder,
    content_of,
    newest_checkpoint,
    require_no_other_run,
)
from flow_train.files import take_lock
from flow_train.metrics.log import CSV_NAME, JSONL_NAME, JsonLines, Logger, finite_or_none
from flow_train.metrics.work import adamw_states
from libai_projects.command.arguments import Options
from libai_projects.engine.task import THEIR_RESULTS, THEIR_SPLITS
from libai_projects.models.families import table_of
from libai_projects.weights import old_runs

CONFIG_BACKUP = "config.yaml"
# These keys must be equal for a checkpoint to fit the model.
_SHAPE_KEYS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "max_seq_length",
    "vocab_size_real",
    "num_tokentypes",
    "masked_lm_only",
)
METRICS_NAME = "metrics.json"
EVALUATION = "evaluation"
# The files and folders that a run leaves in its directory; the first are LiBai's and older ones.
_OF_A_RUN = (
    *("model_*", "last_checkpoint", "checkpoints", f"{CONFIG_BACKUP}*", "log.txt*", METRICS_NAME),
    *(JSONL_NAME, CSV_NAME, "wandb", CURVES_NAME, "tensorboard", EVALUATION),
)


def check_output(cfg: DictConfig, options: Options) -> None:
    """Check that train.output_dir can be written to and has room for two checkpoints."""
    output = Path(cfg.train.output_dir)
    existing = output
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"train.output_dir={output}: {existing} is a file, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"train.output_dir={output}: no permission to write to {existing}; choose another one"
        )
    if options.eval_only:
        return
    needed = 2 * checkpoint_bytes(cfg)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"train.output_dir={output}: {_size(free)} are free on its disk, and two checkpoints "
            f"of this model (one kept while the next is written) take {_size(needed)}; make room "
            "or choose another disk"
        )


def checkpoint_bytes(cfg: DictConfig) -> int:
    """About how large a checkpoint is: float32 weights and the two values that AdamW keeps."""
    model, target = (try_get_key(cfg, f"model.{key}", default=None) for key in ("cfg", "_target_"))
    try:
        states = adamw_states(table_of(target).count(model))
    except (AttributeError, KeyError, TypeError):
        # Another model, whose weights have other names for their sizes.
        return 0
    return states["weights"] + states["AdamW's moments"]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def check_resume(cfg: DictConfig) -> None:
    """Check that the run to resume, if there is one, is of this model; and that one of LiBai's form
    is whole, and where the main process reads it. Every process calls it."""
    output = Path(cfg.train.output_dir)

    def check() -> bool:
        found = newest_checkpoint(output) or old_runs.last(output)
        if found is not None:
            check_same_model(cfg, output / CONFIG_BACKUP)
        return found is not None

    found = on_rank_0(check)
    newest = [str(path) for path in old_runs.numbered(output)][-1:]
    everywhere = distributed.all_gather_json([socket.gethostname(), newest])
    elsewhere = next((each for each in everywhere if each[1]), None)
    if elsewhere and not found:
        raise UserError(
            f"--resume: {elsewhere[1][0]} is on {elsewhere[0]}, and process 0 on "
            f"{everywhere[0][0]}, which reads it for all, has none: copy the run's folder there, "
            "or let that machine be the first"
        )


def check_same_model(cfg: DictConfig, backup: Path) -> None:
    """Check that an earlier run's config.yaml has the same model; the error lists what differs."""
    # Without a readable backup the shapes in the checkpoint decide.
    earlier = try_get_key(OmegaConf.create(read_backup(backup)), "model.cfg", default=None)
    if not isinstance(earlier, DictConfig):
        return
    now = try_get_key(cfg, "model.cfg", default={})
    different = [
        f"{key}={now.get(key)} (there: {earlier[key]})"
        for key in _SHAPE_KEYS
        if key in earlier and key in now and earlier[key] != now.get(key)
    ]
    if different:
        raise UserError(
            f"{backup.parent} holds a run of another model: model.cfg.{', '.join(different)}; "
            "choose another train.output_dir, or the model of that run"
        )


class _PlainLoader(yaml.SafeLoader):
    """Reads what LiBai writes; a Python tuple becomes a list, any other Python object None."""


_PlainLoader.add_constructor(
    "tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node)
)
_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def read_backup(backup: Path) -> dict[str, Any]:
    """A run's config.yaml as plain values, empty where it cannot be read."""
    try:
        return dict(yaml.load(backup.read_text(encoding="utf-8"), Loader=_PlainLoader))
    except (OSError, yaml.YAMLError, TypeError, ValueError):
        return {}


def make_room(cfg: DictConfig, *, resume: bool) -> list[str]:
    """Move what an earlier run left in train.output_dir to previous-N there, unless it goes on.
    Returns lines for the log; UserError where another process writes there, or files cannot be
    moved. Every process calls it."""
    folder = Path(cfg.train.output_dir)

    def move() -> list[str]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / ".lock")
            running = checkpoint_folder(folder)
            writes = take_lock(running / ".lock") if running.is_dir() else lock
            if lock is None or writes is None:
                raise UserError(
                    f"train.output_dir={folder}: another run is writing there; wait for it, or "
                    "choose another directory"
                )
            with lock, writes:
                lines = [] if resume else _move_aside(folder)
        except OSError as error:
            raise UserError(f"train.output_dir={folder}: {error}") from error
        found = newest_checkpoint(folder)
        if found is None or not is_ours(found):
            found = old_runs.last(folder)
        require_no_other_run(folder, found if resume else None)
        return lines

    return on_rank_0(move)


def _move_aside(folder: Path) -> list[str]:
    newest = newest_checkpoint(folder)
    is_old = any(path.is_dir() for path in folder.glob("model_*"))
    # A run of another program of this project stays in place, so it must be refused.
    if not is_old and (newest is None or not is_ours(newest)):
        return []
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    aside = folder / f"previous-{number}"
    aside.mkdir()
    for pattern in _OF_A_RUN:
        for path in sorted(folder.glob(pattern)):
            os.replace(path, aside / path.name)
    return [f"an earlier run was in {folder}: moved to {aside} (--resume goes on with a run)"]


def is_ours(checkpoint: Path) -> bool:
    """Whether a checkpoint is of a LiBai config."""
    content = content_of(checkpoint)
    return content is not None and "dataloader" in (content["state"].get("config") or {})


class MetricsJson(Logger):
    """LiBai's metrics.json: an object per line by LiBai's names, `iteration` counting finished
    iterations."""

    _OF_STEPS: Mapping[str, str] = {
        "loss": "total_loss",
        "step_seconds": "time",
        "data_seconds": "data_time",
        "lr": "lr",
        "grad_norm": "grad_norm",
    }

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = JsonLines(path)

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if split == "train":
            line = {
                theirs: values[ours] for ours, theirs in self._OF_STEPS.items() if ours in values
            }
        else:
            prefix = THEIR_SPLITS.get(split, split)
            line = {f"{prefix}/{THEIR_RESULTS.get(n, n)}": value for n, value in values.items()}
        finite = {name: finite_or_none(value) for name, value in line.items()}
        self._file.add(dict(sorted({"iteration": step, **finite}.items())))

    def truncate(self, step: int) -> None:
        kept = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            # LiBai's own writer may have left one that is not whole.
            with suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["iteration"] <= step:
                    kept.append(line)
        self._file.keep(kept)

    def close(self) -> None:
        self._file.close()
