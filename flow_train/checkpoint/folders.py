"""Checkpoints: safetensors and JSON in one folder per step; no kill can spoil those that exist.
At the end: which one a run goes on from, and whose folder it may write into.

    DIR/step-00000123/model.safetensors       parameters and buffers
                      optimizer.safetensors   e.g. momentum
                      state.json              format, checksums, and what else resuming needs
    DIR/latest, DIR/best                      text files that hold a folder's name

Of a model that is cut over processes it holds, in place of the first two, what each of them keeps
(see `flow_train.checkpoint.shards`); processes without a common disk have such a folder each:

    DIR/step-00000123/shard-00000-of-00004.safetensors

A checkpoint is written into a hidden temporary folder, every file synced, and the folder renamed: a
folder named `step-*` is complete. `latest` is written last, for people and scripts; reading goes by
the folders themselves, newest first, and takes the first whose checksums hold.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oneflow_accel import distributed
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import safetensors.numpy

from flow_train.checkpoint import libai_files
from flow_train.checkpoint.shards import (
    MODEL,
    FileArrays,
    Layout,
    OwnPieces,
    ShardedArrays,
    write_safetensors,
)
from flow_train.files import (
    TEMPORARY,
    publish_folder,
    remove_folder,
    remove_leftovers,
    replace_file,
    sha256_of,
    write_synced,
)
from flow_train.metrics.log import JSONL_NAME

logger = logging.getLogger("oneflow_accel")


_FORMAT = 1
_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"


@dataclass
class Checkpoint:
    """What a run needs to go on. Tensors are in the standard layout (NCHW, OIHW), the optimizer's
    in that of their parameters; those of a folder of shards are read when they are asked for.
    `state` is plain JSON: dicts with text keys, lists, text, numbers, True, False and None. `name`
    is the architecture's; the checkpoint was read from `folder`."""

    model: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    folder: Path | None = field(default=None, compare=False)
    # Where the arrays are one process's pieces: how they make up the whole ones.
    layout: Layout | None = field(default=None, compare=False)


class CheckpointManager:
    """The checkpoints of one run in one folder: the `keep_last` newest and the best one."""

    def __init__(self, directory: Path | str, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self._lock: IO[bytes] | None = None
        # The processes that see this folder, where shards are written.
        self._sharers: list[int] = []

    def claim(self) -> None:
        """Keep other processes from writing here, before training starts; `save` does it otherwise.
        CheckpointError where another process writes here, or the folder cannot be written to.
        Whether it holds another run is for `resume.require_no_other_run` to say."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            remove_leftovers(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.directory}: {error.strerror or error}"
            ) from error

    def save(
        self, checkpoint: Checkpoint, *, step: int, best: bool = False, keep: Collection[int] = ()
    ) -> Path:
        """Write a checkpoint, point `latest` (and `best`) to it, prune old ones but those of the
        steps in `keep`, and return its folder. CheckpointError if that fails (disk full, ...), with
        earlier ones as before; TypeError if JSON would not give `checkpoint.state` back as it
        is."""
        _require_exact_json(checkpoint.state, "state")
        if self._lock is None:
            self.claim()
        try:
            folder = self._write(checkpoint, step)
            self._point_to(folder, best)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: "
                f"{_why(error)}"
            ) from error
        self._prune(keep)
        return folder

    def save_shards(
        self, checkpoint: Checkpoint, *, step: int, best: bool = False, keep: Collection[int] = ()
    ) -> None:
        """The same by all processes of a job, each with its pieces; a collective call.

        The folder gets its name when all pieces, on all machines, are on disk. CheckpointError on
        every process, which names the process and the file, where one could not be written.
        """
        layout = checkpoint.layout
        assert layout is not None
        _require_exact_json(checkpoint.state, "state")
        rank = distributed.rank()
        if not self._sharers:
            self._find_sharers()
        leader = self._sharers[0]
        token = distributed.all_gather_json(secrets.token_hex(4))[0]
        temporary = self.directory / f"{TEMPORARY}step-{step:08d}-{token}"
        # Of replicas one writes, on each machine.
        writes = self._places(layout).index(layout.place)
        name = layout.file_of(layout.place)

        def write() -> dict[str, str]:
            temporary.mkdir(exist_ok=True)
            if self._sharers[writes] != rank:
                return {}
            return {name: _write_pieces(temporary / name, checkpoint, step)}

        def publish() -> str | None:
            if rank != leader:
                return None
            content = self._content(checkpoint, step, checksums)
            content["shards"] = layout.as_json()
            folder = self._publish(temporary, step, content)
            self._point_to(folder, best)
            self._prune(keep)
            return folder.name

        try:
            checksums = {
                key: value
                for found in _together(write, temporary / name)
                for key, value in found.items()
            }
            _together(publish, temporary / _STATE)
        except CheckpointError:
            if rank == leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def save_cut(self, checkpoint: Checkpoint, processes: int, *, step: int) -> Path:
        """Write a checkpoint of whole tensors in shards, of the model alone; one tensor after the
        other is read. Errors as those of `save`."""
        self.claim()
        temporary = Path(
            tempfile.mkdtemp(prefix=f"{TEMPORARY}step-{step:08d}-", dir=self.directory)
        )
        try:
            shapes = {name: tuple(array.shape) for name, array in checkpoint.model.items()}
            checksums = {}
            for place in range(processes):
                layout = Layout.even(processes, place, shapes)
                pieces = OwnPieces(checkpoint.model, layout, MODEL)
                name = layout.file_of(place)
                kinds = {
                    full_name: (np.dtype(np.float32), (length,))
                    for full_name, (_, length) in zip(pieces, layout.groups.values(), strict=True)
                }
                checksums[name] = write_safetensors(
                    temporary / name,
                    kinds,
                    pieces.__getitem__,
                    {"step": str(step), "model": checkpoint.name},
                )
            content = self._content(checkpoint, step, checksums)
            return self._publish(temporary, step, {**content, "shards": layout.as_json()})
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _find_sharers(self) -> None:
        """Which processes see this folder: those whose marks are in it."""
        token = distributed.all_gather_json(secrets.token_hex(4))[0]

        def mark() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{TEMPORARY}{token}-{distributed.rank()}").touch()

        def look() -> None:
            marks = self.directory.glob(f"{TEMPORARY}{token}-*")
            self._sharers = sorted(int(path.name.rpartition("-")[2]) for path in marks)

        def clean() -> None:
            if self._sharers[0] == distributed.rank():
                self.claim()

        for part in (mark, look, clean):
            _together(part, self.directory)

    def _places(self, layout: Layout) -> list[int]:
        """Of the processes that see this folder, which pieces they have."""
        every = distributed.all_gather_json(layout.place)
        return [int(every[rank]) for rank in self._sharers]

    def _point_to(self, folder: Path, best: bool) -> None:
        pointer = f"{folder.name}\n".encode()
        replace_file(self.directory / "latest", pointer)
        if best:
            replace_file(self.directory / "best", pointer)

    def steps(self) -> set[int]:
        return {step for folder in _step_folders(self.directory) if (step := step_of(folder))}

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, or None where there is none at all; a warning names
        each damaged one. CheckpointError if every one is damaged: starting afresh is then the
        user's decision."""
        folders = _step_folders(self.directory)
        for folder in folders:
            try:
                _read_verified(folder)
            except CheckpointError as error:
                logger.warning("checkpoint passed over: %s", error)
            else:
                return folder
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints in {self.directory} is intact; "
                "restore one from a backup or start afresh in another output folder"
            )
        return None

    def best(self) -> Path | None:
        try:
            folder = self.directory / (self.directory / "best").read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() and folder != self.directory else None

    def load(self, path: Path | str, places: Collection[int] | None = None) -> Checkpoint:
        """Read and verify one checkpoint; CheckpointError names a file that is missing or damaged.
        Of one in shards those of `places` are verified, None for all."""
        folder = Path(path)
        state, files = _read_verified(folder, places)
        if "shards" in state:
            layout = Layout.of_json(state["shards"])
            return Checkpoint(
                model=ShardedArrays(folder, layout, MODEL),
                optimizer=ShardedArrays(folder, layout),
                state=state["state"],
                name=state["name"],
                folder=folder,
                layout=layout,
            )
        return Checkpoint(
            model=safetensors.numpy.load(files[_MODEL]),
            optimizer=safetensors.numpy.load(files[_OPTIMIZER]),
            state=state["state"],
            name=state["name"],
            folder=folder,
        )

    def close(self) -> None:
        """Let another run write to the folder; the end of the process does it too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write(self, checkpoint: Checkpoint, step: int) -> Path:
        temporary = Path(
            tempfile.mkdtemp(prefix=f"{TEMPORARY}step-{step:08d}-", dir=self.directory)
        )
        try:
            checksums = {}
            for file_name, tensors in (
                (_MODEL, checkpoint.model),
                (_OPTIMIZER, checkpoint.optimizer),
            ):
                shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
                checksums[file_name] = write_safetensors(
                    temporary / file_name, shapes, tensors.__getitem__, {}
                )
            return self._publish(temporary, step, self._content(checkpoint, step, checksums))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _content(
        self, checkpoint: Checkpoint, step: int, checksums: dict[str, str]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "serial": 1 + max(map(_serial, _step_folders(self.directory)), default=0),
            "name": checkpoint.name,
            "files": checksums,
            "state": checkpoint.state,
        }

    def _publish(self, temporary: Path, step: int, content: dict[str, Any]) -> Path:
        text = json.dumps(
            {"format": _FORMAT, "sha256": _checksum(content), "content": content}, indent=1
        )
        write_synced(temporary / _STATE, text.encode())
        temporary.chmod(0o755)
        folder = self._unused_name(step)
        publish_folder(temporary, folder)
        return folder

    def _unused_name(self, step: int) -> Path:
        """A step that is saved twice gets a second folder: an existing one is never replaced."""
        folder = self.directory / f"step-{step:08d}"
        copies = 1
        while folder.exists():
            copies += 1
            folder = self.directory / f"step-{step:08d}.{copies}"
        return folder

    def _prune(self, keep: Collection[int]) -> None:
        best = self.best()
        readable = [folder for folder in _step_folders(self.directory) if _serial(folder)]
        for folder in readable[self.keep_last :]:
            if folder == best or step_of(folder) in keep:
                continue
            try:
                remove_folder(folder)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", folder, error)

    def _take_lock(self) -> None:
        """Hold DIR/.lock until `close` or the process's end. It is a POSIX lock, because data
        workers forked later do not inherit those: it goes with this process however it dies."""
        if self._lock is not None:
            return
        lock = (self.directory / ".lock").open("ab")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                lock.close()
                raise CheckpointError(
                    f"another run is writing checkpoints to {self.directory}; wait for it to end "
                    "or choose another output folder"
                ) from error
            logger.info("%s cannot be locked against a second run: %s", self.directory, error)
        self._lock = lock


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint: its folder, the newest intact one in a folder of several, or what a
    `latest` or `best` file names. CheckpointError if there is none, or it is damaged."""
    path = Path(path)
    if path.name in ("latest", "best") and path.is_file():
        path = path.with_name(path.read_text().strip())
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder that holds {_STATE} and {_MODEL}"
        )
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: no such folder")
    if path.name.startswith("step-") or (path / _STATE).exists():
        return CheckpointManager(path.parent).load(path)
    manager = CheckpointManager(path)
    latest = manager.latest()
    if latest is None:
        raise CheckpointError(f"no checkpoint in {path}: it has no folder named step-*")
    return manager.load(latest)


def _step_folders(directory: Path) -> list[Path]:
    """Folders named `step-*`, the one saved last first; before them those with no readable state,
    so that whoever looks for the newest hears of them."""
    return sorted(
        (path for path in directory.glob("step-*") if path.is_dir()),
        key=lambda path: (_serial(path) or sys.maxsize, path.name),
        reverse=True,
    )


def step_of(folder: Path) -> int | None:
    digits = folder.name.removeprefix("step-").partition(".")[0]
    return int(digits) if digits.isdecimal() else None


def _serial(folder: Path) -> int:
    """The save's number within its run, counted from 1; 0 if that cannot be read."""
    content = _content_of(folder)
    return 0 if content is None else int(content["serial"])


def _write_pieces(path: Path, checkpoint: Checkpoint, step: int) -> str:
    """One process's pieces, and what is not cut."""
    arrays = {f"{MODEL}/{name}": array for name, array in checkpoint.model.items()}
    arrays |= checkpoint.optimizer
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    metadata = {"step": str(step), "model": checkpoint.name}
    return write_safetensors(path, shapes, arrays.__getitem__, metadata)


def _together(part: Callable[[], Any], file: Path) -> list[Any]:
    """What every process's `part` returned; a CheckpointError on all where one has failed."""
    result, failure = None, None
    try:
        result = part()
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = (
            f"the checkpoint could not be written: process {distributed.rank()} on "
            f"{socket.gethostname()}, {error.filename or file}: {_why(error)}"
        )
    answers = distributed.all_gather_json([result, failure])
    failures = [text for _, text in answers if text is not None]
    if failures:
        raise CheckpointError(failures[0])
    return [found for found, _ in answers]


def _why(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space or choose another output folder; " if full else ""
    return f"{error.strerror or error}; {hint}earlier checkpoints are intact"


def _read_verified(
    folder: Path, places: Collection[int] | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    try:
        record = json.loads((folder / _STATE).read_bytes())
        version = record["format"]
        if isinstance(version, int) and version > _FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {version}, newer than {_FORMAT} that this version "
                "of oneflow_accel reads; upgrade it"
            )
        content = record["content"]
        if record["sha256"] != _checksum(content):
            raise _damaged(folder / _STATE, "its content does not match its checksum")
        files: dict[str, bytes] = {}
        if "shards" in content:
            _verify_shards(folder, content, places)
            return content, files
        for file_name, checksum in content["files"].items():
            data = (folder / file_name).read_bytes()
            if hashlib.sha256(data).hexdigest() != checksum:
                raise _damaged(folder / file_name, f"its {len(data)} bytes do not match")
            files[file_name] = data
        return content, files
    except FileNotFoundError as error:
        raise _damaged(Path(error.filename), "the file is missing") from error
    except OSError as error:
        raise _damaged(folder, f"it cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder / _STATE, "it is not a checkpoint's state") from error


def _verify_shards(
    folder: Path, content: Mapping[str, Any], places: Collection[int] | None
) -> None:
    layout = Layout.of_json(content["shards"])
    wanted = range(layout.processes) if places is None else sorted(set(places))
    names = [layout.file_of(place) for place in wanted]
    missing = [
        str(place)
        for place, name in zip(wanted, names, strict=True)
        if not (folder / name).is_file()
    ]
    if missing:
        raise _damaged(
            folder,
            f"the shards of processes {', '.join(missing)} of {layout.processes} are missing",
        )
    for name in names:
        if sha256_of(folder / name) != content["files"].get(name):
            raise _damaged(folder / name, _what_it_is(folder / name, content["step"]))


def _what_it_is(path: Path, step: int) -> str:
    """What is wrong with a shard whose checksum is not that of its checkpoint."""
    try:
        theirs = FileArrays(path).metadata.get("step", str(step))
    except CheckpointError:
        theirs = str(step)
    if theirs != str(step):
        return f"it is of step {theirs}, the checkpoint of step {step}"
    return "its content does not match its checksum"


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({why}); resume from another checkpoint")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _require_exact_json(value: Any, where: str) -> None:
    """Refuse what JSON would silently change: tuples, keys that are not text, numpy scalars."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}; keys must be text")
            _require_exact_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_exact_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{where} is a {type(value).__name__}, which JSON does not give back as is")


AUTO_RESUME = "auto"
# The picture that a run draws when it ends.
CURVES_NAME = "curves.png"


def checkpoint_folder(output_dir: Path) -> Path:
    return output_dir / "checkpoints"


def checkpoint_to_resume(resume: str | None, output_dir: Path) -> Checkpoint | None:
    """The checkpoint that a user asked to resume from: its folder, or the newest one in a folder of
    several or of a run; None where none was asked for. "auto" is the newest one in `output_dir`,
    or None. CheckpointError if the one named is not there, or none is intact."""
    if resume is None:
        return None
    if resume != AUTO_RESUME:
        inside = checkpoint_folder(Path(resume))
        return read_checkpoint(inside if inside.is_dir() else resume)
    latest = CheckpointManager(checkpoint_folder(output_dir)).latest()
    if latest is None:
        logger.info("no checkpoint in %s yet: starting from the beginning", output_dir)
        return None
    return read_checkpoint(latest)


def agreed_checkpoint(
    directory: Path,
    processes: int,
    place: int,
    *,
    reshard: bool = False,
    epoch: int | None = None,
) -> Checkpoint | None:
    """The newest checkpoint that all processes of a job can go on from, also where each sees a
    folder of its own; None where nobody has any. A collective call.

    Args:
        processes, place: how this job cuts a model, and which pieces this process has. A checkpoint
            that was cut alike needs this process's shard only.
        reshard: take one that was cut over another number of processes as well; all its shards must
            be here.
        epoch: take the one of this epoch only, counted from 1.

    Raises:
        UserError: it was cut over another number of processes.
        CheckpointError: none is intact, or there is none of the epoch.
    """
    states = {folder.name: _content_of(folder) for folder in _step_folders(directory)}
    fitting = [
        name
        for name, content in states.items()
        if content is not None
        and (epoch is None or (content["state"]["epoch"], content["state"]["batch"]) == (epoch, 0))
    ]
    lists = distributed.all_gather_json(fitting)
    candidates = [name for name in lists[0] if all(name in names for names in lists)]
    for name in candidates:
        content = states[name]
        assert content is not None
        theirs = content["shards"]["processes"] if "shards" in content else None
        if theirs not in (None, processes) and not reshard:
            raise UserError(
                f"{directory / name} was written by {theirs} processes and this job cuts the model "
                f"over {processes}: start {theirs}, or allow another number with --reshard"
            )
        places = (place,) if theirs == processes else None
        if not _wrong_anywhere(directory / name, places):
            return CheckpointManager(directory).load(directory / name, ())
    if not any(distributed.all_gather_json(len(states))):
        if epoch is None:
            return None
        raise CheckpointError(f"no checkpoint of epoch {epoch}: there is none in {directory}")
    if epoch is not None and not candidates:
        theirs = sorted({c["state"]["epoch"] for c in states.values() if c is not None})
        raise CheckpointError(
            f"no checkpoint of epoch {epoch} in {directory} that all processes have; here are "
            f"those of {', '.join(map(str, theirs)) or 'none'}"
        )
    raise CheckpointError(
        f"no checkpoint in {directory} is whole for all processes of this job; "
        "restore one from a backup or start afresh in another folder"
    )


def _wrong_anywhere(folder: Path, places: Collection[int] | None) -> bool:
    """Whether a process finds this checkpoint damaged; each that does says why."""
    found = None
    try:
        _read_verified(folder, places)
    except CheckpointError as error:
        found = f"process {distributed.rank()} on {socket.gethostname()}: {error}"
    problems = [text for text in distributed.all_gather_json(found) if text is not None]
    for text in problems:
        logger.warning("checkpoint passed over: %s", text)
    return bool(problems)


def _content_of(folder: Path) -> dict[str, Any] | None:
    """What the checkpoint says of itself, not verified; None if that cannot be read."""
    try:
        content = json.loads((folder / _STATE).read_bytes())["content"]
        return content if isinstance(content["state"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_model(checkpoint: Checkpoint, name: str, num_classes: int) -> None:
    """Refuse a checkpoint of another model or number of classes: CheckpointError names both. Of
    weights from elsewhere, which have no name, it is seen as they are read."""
    theirs = (checkpoint.name, checkpoint.state.get("num_classes"))
    if checkpoint.name and theirs != (name, num_classes):
        raise CheckpointError(
            f"the checkpoint is of another model: {theirs[0]} with {theirs[1]} classes, this run "
            f"is {name} with {num_classes}; give the model and the data that it comes from"
        )


def way_on(folder: Path, resume: str) -> str:
    """A sentence without its full stop: what to do after the run in a folder was interrupted."""
    found = sorted(path.name for path in checkpoint_folder(folder).glob("step-*"))
    if not found:
        return f"no checkpoint was written to {folder}"
    return f"the newest checkpoint in {folder} is {found[-1]}: continue with {resume}"


def require_no_other_run(folder: Path, resumed_from: Path | None = None) -> None:
    """Refuse to write into a folder that holds another run: its log would be cut, its checkpoints
    taken for old ones and deleted. CheckpointError names what shows it. A run that goes on from
    `resumed_from`, a checkpoint in this folder, is the same run.

    Every command that trains or writes a checkpoint asks this before it writes anything.
    """
    trace = _trace_of_a_run(folder)
    inside = None if resumed_from is None else folder.resolve() in resumed_from.resolve().parents
    if trace is None or inside:
        return
    if resumed_from is None:
        way_out = "resume from it, or choose another output folder"
    else:
        way_out = f"{resumed_from} is of another run: choose that run's folder, or a new one"
    raise CheckpointError(f"{folder} already holds a run ({trace.relative_to(folder)}); {way_out}")


def _trace_of_a_run(folder: Path) -> Path | None:
    """What shows that there is a run of any of this project's programs."""
    for directory in (checkpoint_folder(folder), folder):
        found = sorted(path for path in directory.glob("step-*") if path.is_dir())
        if found:
            return found[-1]
    numbered = libai_files.numbered(folder)
    if numbered:
        return list(numbered.values())[-1]
    # A run that has ended, and whose checkpoints were taken away. One that was killed before its
    # first checkpoint has nothing to lose.
    ended = (folder / JSONL_NAME, folder / CURVES_NAME)
    return ended[0] if all(path.exists() for path in ended) else None
