"""Runs in the form of LiBai 0.1.1, which it wrote, or this project once, to go on with; and a
checkpoint of ours in that form, for LiBai to go on with.

    DIR/model_0000123/model/pickled_data, ...   a folder of `oneflow.save` per part
                      optimizer/... or graph/... in eager mode, or of LiBai's graph
                      lr_scheduler/..., trainer/...
                      model/checksums.json      of ours: size and SHA-256 of every file
    DIR/last_checkpoint                         the name of the newest numbered checkpoint

The optimizer of ours has the names of its parameters; LiBai's has their numbers in eager mode, and
the names of a graph's variables under nn.Graph.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow

from flow_train.checkpoint.folders import Checkpoint, read_checkpoint
from flow_train.checkpoint.optimizer_state import EAGER_KEYS, GRAPH_SUFFIXES, TRAIN_STEP
from flow_train.checkpoint.whole import Spread
from flow_train.files import sha256_of
from libai_projects.weights import oneflow_files
from libai_projects.weights.folders import replaced_folder
from libai_projects.weights.oneflow_files import StoredTensor

MANIFEST = "model/checksums.json"
LAST = "last_checkpoint"
# Before the number of a parameter whose name the checkpoint does not tell.
NUMBER = "#"
_NUMBERED = re.compile(r".+_(\d{7,})")
_KEYS = {eager: key for key, eager in EAGER_KEYS.items()}

# Where an array lies: a part's folder, and its tensor there.
_Place = tuple[Path, StoredTensor]


def iteration_of(name: str) -> int | None:
    """The number in a name such as "model_0000123", or None."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def numbered(directory: Path) -> list[Path]:
    """The numbered checkpoints in a folder, oldest first; damaged ones too."""
    found = [path for path in directory.glob("model_*") if path.is_dir()]
    return sorted((p for p in found if iteration_of(p.name) is not None), key=lambda p: p.name)


def last(directory: Path) -> Path | None:
    """The checkpoint that `last_checkpoint` names, or the newest numbered one where that name has
    no number ("model_final", as LiBai writes at the end of a run); None where no run has saved
    here. CheckpointError, which says what to do, if it is damaged or not there."""
    pointer = directory / LAST
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        if numbered(directory):
            raise CheckpointError(f"{pointer} is missing; {_way_out(directory)}") from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from error
    if iteration_of(name) is None or Path(name).name != name:
        intact = _newest_intact(directory)
        if intact is None:
            raise CheckpointError(
                f"{pointer} names {name!r}, and only a numbered checkpoint can be resumed from; "
                f"there is no intact one in {directory}: to go on from its weights alone, set "
                f"train.load_weight={directory / name} and leave out --resume"
            )
        return intact
    try:
        verify(directory / name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_way_out(directory)}") from error
    return directory / name


def verify(folder: Path) -> None:
    """Check that a checkpoint is whole: by checksums, or, in one that LiBai wrote, by sizes.
    CheckpointError names the file that is missing or damaged."""
    if not (folder / "model").is_dir():
        raise CheckpointError(f"{folder / 'model'} is missing")
    try:
        if not (folder / MANIFEST).is_file():
            for part in sorted(folder.iterdir()):
                oneflow_files.check(part)
            return
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, (_, digest) in dict(files).items():
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name} is missing")
            if sha256_of(folder / name) != digest:
                raise CheckpointError(
                    f"{folder / name} is corrupt: its checksum is not that of what was written"
                )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is corrupt ({error!r})") from error


def _newest_intact(directory: Path) -> Path | None:
    for folder in reversed(numbered(directory)):
        try:
            verify(folder)
        except CheckpointError:
            continue
        return folder
    return None


def _way_out(directory: Path) -> str:
    intact = _newest_intact(directory)
    if intact is None:
        return f"no checkpoint in {directory} is intact; restore one, or start without --resume"
    return (
        f"the newest intact checkpoint is {intact.name}: to resume from it, write its name into "
        f"{directory / LAST}"
    )


class _Stored(Mapping[str, np.ndarray]):
    """Arrays, read when they are asked for."""

    def __init__(self, places: Mapping[str, _Place]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> np.ndarray:
        return oneflow_files.read_array(*self._places[name])

    def __iter__(self) -> Any:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read(directory: Path, global_batch_size: int) -> Checkpoint | None:
    """The newest checkpoint of such a run, in the form of `flow_train`; None without one. The first
    process reads each array for all when it is asked for. Every process calls it; errors are those
    of `last`."""
    model: Mapping[str, np.ndarray] = {}
    optimizer: Mapping[str, np.ndarray] = {}

    def look() -> list[Any] | None:
        nonlocal model, optimizer
        folder = last(directory)
        if folder is None:
            return None
        model = _Stored({n: (folder / "model", t) for n, t in _part(folder, "model").items()})
        optimizer = _Stored(_optimizer(folder))
        state = _state(folder, global_batch_size)
        return [str(folder), list(model), list(optimizer), state]

    found = on_rank_0(look)
    if found is None:
        return None
    folder, tensors, kept, state = found
    return Checkpoint(Spread(model, tensors), Spread(optimizer, kept), state, folder=Path(folder))


def _part(folder: Path, name: str) -> dict[Any, Any]:
    if not (folder / name).is_dir():
        raise CheckpointError(
            f"{folder} holds no {name}, only weights: start from them with train.load_weight, "
            "without --resume"
        )
    return dict(oneflow_files.read_structure(folder / name))


def _optimizer(folder: Path) -> dict[str, _Place]:
    """Where its arrays lie, by KEY/NAME, and by "graph/" and their names those of a graph alone."""
    if not (folder / "optimizer").is_dir():
        place = folder / "graph"
        return {n: (place, t) for n, t in _of_graph(_part(folder, "graph")).items()}
    content, place = _part(folder, "optimizer"), folder / "optimizer"
    names = content.get("names")
    found = {}
    for number, entries in content["state"].items():
        if number != "step":
            name = f"{NUMBER}{number}" if names is None else names[number]
            for key, tensor in entries.items():
                found[f"{_KEYS.get(key, key)}/{name}"] = tensor
    found |= _of_graph(content.get("graph", {}))
    return {name: (place, t) for name, t in found.items() if isinstance(t, StoredTensor)}


def _of_graph(variables: Mapping[str, Any]) -> dict[str, StoredTensor]:
    found = {}
    for variable, tensor in variables.items():
        if not isinstance(tensor, StoredTensor) or variable == TRAIN_STEP:
            continue
        name = f"graph/{variable}"
        for key, suffix in GRAPH_SUFFIXES.items():
            if variable.startswith("model.") and variable.endswith(suffix):
                name = f"{key}/{variable.removeprefix('model.').removesuffix(suffix)}"
        found[name] = tensor
    return found


def _state(folder: Path, global_batch_size: int) -> dict[str, Any]:
    trainer = _part(folder, "trainer") if (folder / "trainer").is_dir() else {}
    step = (iteration_of(folder.name) or 0) + 1
    callbacks: dict[str, Any] = {}
    if trainer.get("early_stop"):
        best, _, waited = trainer["early_stop"]
        best = best if math.isfinite(best) else None
        callbacks["early_stopping"] = {"best": best, "waited": waited}
    consumed = trainer.get("consumed_samples", step * global_batch_size)
    return {
        "step": step,
        "seed": trainer.get("seed"),
        "rng": trainer.get("rng") or [],
        "phase": "dense" if trainer.get("is_dense") else None,
        "train_step": {
            "lr_scheduler": _part(folder, "lr_scheduler"),
            "consumed_samples": consumed,
        },
        "callbacks": callbacks,
    }


def write(source: Path, target: Path, *, graph: bool, force: bool = False) -> Path:
    """Write a run's checkpoint into the folder `target`, so that LiBai's own trainer goes on from
    it with train.output_dir=target, eagerly or under its graph; returns the checkpoint there.
    UserError: `source` is not such a checkpoint, is damaged, or what LiBai cannot go on from; and
    as `replaced_folder`."""
    found = read_checkpoint(source)
    step, kept = found.state["step"], found.state["train_step"]
    if "param_groups" not in kept:
        raise UserError(f"{source} is not a checkpoint of a LiBai run: it names no parameters")
    if not graph and (found.state["config"]["train"].get("num_accumulation_steps") or 1) > 1:
        raise UserError(
            f"{source} is of a run that accumulates gradients, whose steps LiBai counts otherwise "
            "in eager mode: take graph"
        )
    moments: dict[Any, Any] = defaultdict(dict, step=step)
    variables = {TRAIN_STEP: flow.tensor([step], dtype=flow.int64)}
    for name, array in found.optimizer.items():
        key, _, parameter = name.partition("/")
        tensor = flow.tensor(array)
        if key in GRAPH_SUFFIXES:
            moments[kept["parameters"].index(parameter)][EAGER_KEYS.get(key, key)] = tensor
            variables[f"model.{parameter}{GRAPH_SUFFIXES[key]}"] = tensor
        else:
            # Of a graph alone, such as the float16 loss scale.
            variables[parameter] = tensor
    model = OrderedDict((name, flow.tensor(array)) for name, array in found.model.items())
    parts = {"model": model, "lr_scheduler": kept["lr_scheduler"]}
    if graph:
        parts["graph"] = {"model": model, **variables}
    else:
        parts["optimizer"] = {"state": dict(moments), "param_groups": kept["param_groups"]}
    # LiBai counts from 0.
    name = f"model_{step - 1:07d}"
    with replaced_folder(target, force=force) as temporary:
        for part, content in parts.items():
            flow.save(content, temporary / name / part)
        (temporary / LAST).write_text(name)
    return target / name
