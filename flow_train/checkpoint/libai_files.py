"""LiBai's checkpoints: folders that are whole or not there, and are known to be so when read; and
what they hold of the optimizer (`OptimizerCheckpoint`).

    DIR/model_0000123/model/pickled_data, ...   one folder of `oneflow.save` per component
                      graph/...                 (see oneflow_files)
                      model/checksums.json      size and SHA-256 of every file of the checkpoint
    DIR/last_checkpoint                         the name of the newest numbered checkpoint

A checkpoint is written under a hidden name and renamed when the disk has it. The list of checksums
lies inside `model/` because LiBai reads every entry of a checkpoint as a component. All functions
on folders act on the files of one process; they call no other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import CheckpointError

import oneflow as flow
from oneflow import nn

from flow_train.checkpoint import oneflow_files
from flow_train.checkpoint.optimizer_state import (
    EAGER_KEYS,
    GRAPH_SUFFIXES,
    TRAIN_STEP,
    kept_keys,
    parameter_names,
)
from flow_train.files import TEMPORARY, publish_folder, remove_leftovers, replace_file

MANIFEST = "model/checksums.json"
LAST = "last_checkpoint"
_NUMBERED = re.compile(r"(?P<prefix>.+)_(?P<iteration>\d{7,})")
# Hidden: the old checkpoint of a name while the new one moves in.
_REPLACED = ".replaced-"


def iteration_of(name: str) -> int | None:
    """The number in a name such as "model_0000123", or None."""
    match = _NUMBERED.fullmatch(name)
    return int(match["iteration"]) if match else None


def numbered(directory: Path) -> dict[int, Path]:
    """The numbered checkpoints in a folder by iteration, oldest first; damaged ones too."""
    found = {}
    if directory.is_dir():
        for entry in directory.iterdir():
            iteration = iteration_of(entry.name)
            if iteration is not None and entry.is_dir() and not entry.name.startswith("."):
                found[iteration] = entry
    return dict(sorted(found.items()))


def begin(directory: Path, name: str) -> Path:
    """A new, empty, hidden folder to write a checkpoint into, after clearing what killed runs
    left."""
    directory.mkdir(parents=True, exist_ok=True)
    _restore_replaced(directory)
    remove_leftovers(directory)
    temporary = directory / f"{TEMPORARY}{name}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, name: str) -> Path:
    """Give a written checkpoint its name, in place of one of the same name, and return its folder.
    If that raises OSError, the checkpoint of that name is as before."""
    files = {}
    for file in sorted(temporary.rglob("*")):
        if file.is_file():
            files[file.relative_to(temporary).as_posix()] = _describe(file, sync=True)
    manifest = temporary / MANIFEST
    manifest.parent.mkdir(exist_ok=True)
    replace_file(manifest, json.dumps({"format": 1, "files": files}, indent=1).encode())
    final = temporary.with_name(name)
    replaced = temporary.with_name(f"{_REPLACED}{name}")
    if final.exists():
        # A folder cannot be renamed onto another one. A kill between the two is mended later.
        os.replace(final, replaced)
    try:
        publish_folder(temporary, final)
    except OSError:
        _restore_replaced(final.parent)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def tag(directory: Path, name: str) -> None:
    """Name the newest checkpoint in `last_checkpoint`; readers see the old name or the new."""
    replace_file(directory / LAST, name.encode())


def verify(folder: Path, components: Sequence[str] | None = None) -> None:
    """Check that the `components` of a checkpoint (None: all) are whole: by checksums, or, in one
    that LiBai wrote, by sizes. CheckpointError names the file that is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}")
    if not (folder / "model").is_dir():
        raise CheckpointError(f"{folder / 'model'} is missing")
    try:
        if (folder / MANIFEST).is_file():
            _verify_checksums(folder, components)
        else:
            for component in components or sorted(path.name for path in folder.iterdir()):
                oneflow_files.check(folder / component)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def newest_intact(directory: Path) -> Path | None:
    for folder in reversed(numbered(directory).values()):
        try:
            verify(folder)
        except CheckpointError:
            continue
        return folder
    return None


def last(directory: Path) -> Path | None:
    """The checkpoint that `last_checkpoint` names, or the newest numbered one where that name has
    no number ("model_final", as LiBai writes at the end of a run); None where no run has saved
    here. CheckpointError, which says what to do, if it is damaged or not there."""
    _restore_replaced(directory)
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
        intact = newest_intact(directory)
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


def _restore_replaced(directory: Path) -> None:
    for entry in directory.glob(f"{_REPLACED}*"):
        final = directory / entry.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            os.replace(entry, final)


def _way_out(directory: Path) -> str:
    intact = newest_intact(directory)
    if intact is None:
        return f"no checkpoint in {directory} is intact; restore one, or start without --resume"
    return (
        f"the newest intact checkpoint is {intact.name}: to resume from it, write its name into "
        f"{directory / LAST}"
    )


def _verify_checksums(folder: Path, components: Sequence[str] | None) -> None:
    try:
        files = dict(json.loads((folder / MANIFEST).read_bytes())["files"])
        expected = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is corrupt ({error!r})") from error
    for name, (size, digest) in expected.items():
        if components is not None and Path(name).parts[0] not in components:
            continue
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} is corrupt: it has {file.stat().st_size} bytes where {size} were written"
            )
        if _describe(file)[1] != digest:
            raise CheckpointError(
                f"{file} is corrupt: its checksum is not that of what was written"
            )


def _describe(file: Path, *, sync: bool = False) -> tuple[int, str]:
    """Size in bytes and SHA-256 in hexadecimal."""
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
        return stream.tell(), digest.hexdigest()


# The suffix of a graph's variable, by what the eager optimizer calls it.
_SUFFIXES = {EAGER_KEYS.get(key, key): suffix for key, suffix in GRAPH_SUFFIXES.items()}
# The name that LiBai's graphs give their model.
_MODEL = "model"


class OptimizerCheckpoint:
    """What a checkpoint keeps of an optimizer over a model's global tensors; `graph` is the
    training graph that has compiled it, None in eager mode. `names` are its parameters, in the
    order of their numbers.

    It is one part of a checkpoint, the same in eager mode and under nn.Graph, so that a run goes on
    in the other mode with its moments:

        state          {"step": steps done, 0: {"exp_avg": tensor, ...}, ...} by parameter's number
        param_groups   the settings, as the eager optimizer gives them
        names          of the parameters, by number
        graph          what only a graph has, such as the float16 loss scale; or nothing

    LiBai writes the first two alone in eager mode, and a graph's variables by their own names under
    nn.Graph (in a folder `graph`). Both are read too.
    """

    def __init__(
        self, model: nn.Module, optimizer: flow.optim.Optimizer, graph: nn.Graph | None = None
    ) -> None:
        self._optimizer = optimizer
        self._graph = graph
        self.names = parameter_names(model, optimizer)
        self._shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """The form that the module describes; tensors are global, in the layout they have."""
        state: dict[str, Any] = {**self._optimizer.state_dict(), "names": list(self.names)}
        if self._graph is not None:
            values, extra = _of_graph(self._graph.state_dict(), self.names)
            numbers = {name: number for number, name in enumerate(self.names)}
            state["state"] = {numbers[name]: entries for name, entries in values.items()}
            # The number of steps is among them: a tensor that some processes do not have.
            state["graph"] = extra
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the moments and the number of steps from any of the forms above (tensors on rank 0
        of the host); the settings stay those of this run. Every process calls it, a graph before
        its first step. CheckpointError if it is of other parameters, or holds what this mode cannot
        take."""
        if "param_groups" in state:
            values, extra = self._of_optimizer(state), dict(state.get("graph", {}))
            steps = state["state"].get("step")
        else:
            values, extra = _of_graph(state, self.names)
            steps = None
        self._check(values)
        if self._graph is None:
            self._load_eagerly(values, extra, steps)
        else:
            self._load_into_graph(values, extra, steps)

    def _of_optimizer(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        # LiBai's own state has no names: it has the same parameters in the same order.
        names = state.get("names") or self.names
        if len(numbers) != len(self.names) or set(names) != set(self.names):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(numbers)} parameters, and this run's "
                f"{len(self.names)}, or others: resume with the configuration of that run"
            )
        return {names[number]: state["state"].get(number, {}) for number in numbers}

    def _check(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        wanted = _keys(self._optimizer)
        # Where a parameter takes no part in the loss, eager mode has none for it.
        found = {frozenset(entries) for entries in values.values() if entries}
        if wanted is not None and found != ({wanted} if wanted else set()):
            kept = " and ".join(sorted(set().union(*found))) or "nothing"
            raise CheckpointError(
                f"the checkpoint's optimizer keeps {kept} of a parameter, this run's "
                f"({type(self._optimizer).__name__}) {' and '.join(sorted(wanted)) or 'nothing'}: "
                "resume with the optimizer of that run, or start from its weights alone with "
                "train.load_weight"
            )
        for name, entries in values.items():
            for key, value in entries.items():
                if tuple(value.shape) != self._shapes[name]:
                    raise CheckpointError(
                        f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint, the "
                        f"parameter {self._shapes[name]}"
                    )

    def _load_eagerly(
        self, values: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any], steps: int | None
    ) -> None:
        unknown = [key for key in extra if key.startswith(f"{_MODEL}.")]
        if unknown:
            raise CheckpointError(
                f"the checkpoint is of nn.Graph and holds {unknown[0]}, which the optimizer does "
                "not have in eager mode; resume with graph.enabled=true"
            )
        if steps is None:
            steps = _number(extra[TRAIN_STEP])
        state = self._optimizer.state_dict()
        state["state"]["step"] = steps
        for number, name in enumerate(self.names):
            state["state"][number] = dict(values.get(name, {}))
        self._optimizer.load_state_dict(state)

    def _load_into_graph(
        self, values: Mapping[str, Mapping[str, Any]], extra: Mapping[str, Any], steps: int | None
    ) -> None:
        assert self._graph is not None
        variables = dict(extra)
        if steps is not None:
            first = flow.placement("cpu", [0])
            variables[TRAIN_STEP] = flow.tensor(
                [steps], dtype=flow.int64, placement=first, sbp=flow.sbp.broadcast
            )
        for name, entries in values.items():
            for key, value in entries.items():
                if key not in _SUFFIXES:
                    raise CheckpointError(
                        f"the checkpoint is of eager mode and holds {key} of its optimizer, which "
                        "nn.Graph cannot take; resume with graph.enabled=false"
                    )
                variables[f"{_MODEL}.{name}{_SUFFIXES[key]}"] = value
        self._graph.load_state_dict(variables)


def _of_graph(
    variables: Mapping[str, Any], names: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What a graph keeps, by parameter and the eager optimizer's key, and the rest by its name."""
    places = {
        f"{_MODEL}.{name}{suffix}": (name, key)
        for name in names
        for key, suffix in _SUFFIXES.items()
    }
    values: dict[str, dict[str, Any]] = {}
    extra = {}
    # All processes go in one order, as the tensors are brought to one of them.
    for variable in sorted(variables):
        if variable in places:
            name, key = places[variable]
            values.setdefault(name, {})[key] = variables[variable]
        elif isinstance(variables[variable], flow.Tensor):
            extra[variable] = variables[variable]
    return values, extra


def _keys(optimizer: flow.optim.Optimizer) -> frozenset[str] | None:
    keys = kept_keys(optimizer)
    return None if keys is None else frozenset(EAGER_KEYS.get(key, key) for key in keys)


def _number(tensor: flow.Tensor) -> int:
    """The one element of a tensor of rank 0, on every process."""
    return on_rank_0(lambda: int(tensor.to_local().item()))
