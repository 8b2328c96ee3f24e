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
import hashlib
import json
import logging
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from oneflow_accel import distributed
from oneflow_accel.agree import everywhere, on_rank_0
from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np

from flow_train.checkpoint.shards import (
    MODEL,
    FileArrays,
    OwnPieces,
    ShardedArrays,
    ShardLayout,
    joined,
    write_safetensors,
)
from flow_train.checkpoint.whole import Gathered, Spread
from flow_train.files import (
    TEMPORARY,
    publish_folder,
    remove_folder,
    remove_leftovers,
    replace_file,
    sha256_of,
    take_lock,
    write_synced,
)
from flow_train.metrics.log import JSONL_NAME

logger = logging.getLogger("oneflow_accel")

T = TypeVar("T")

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
    layout: ShardLayout | None = field(default=None, compare=False)


class CheckpointManager:
    """The checkpoints of one run in one folder: the `keep_last` newest (None: all) and the best
    one."""

    def __init__(self, directory: Path | str, keep_last: int | None = 3) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self._lock: IO[bytes] | None = None
        # The processes that see this folder, where shards are written.
        self._sharers: list[int] = []

    def claim(self) -> None:
        """Keep other processes from writing here, before training starts; `save` does it otherwise.
        CheckpointError where another process writes here, or the folder cannot be written to.
        Whether it holds another run is for `require_no_other_run` to say."""
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
            with self._new_folder(step) as temporary:
                checksums = {
                    name: _write_arrays(temporary / name, arrays)
                    for name, arrays in (
                        (_MODEL, checkpoint.model),
                        (_OPTIMIZER, checkpoint.optimizer),
                    )
                }
                content = self._content(checkpoint, step, checksums)
                folder = self._publish(temporary, step, content)
            self._point_to(folder, best)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: "
                f"{_why(error)}"
            ) from error
        self._prune(keep)
        return folder

    def save_gathered(
        self, checkpoint: Checkpoint, *, step: int, best: bool = False, keep: Collection[int] = ()
    ) -> None:
        """The same of `Gathered` arrays by the main process, one after the other; collective,
        with its errors on all."""

        def write() -> None:
            try:
                self.save(checkpoint, step=step, best=best, keep=keep)
            finally:
                drain()

        def drain() -> None:
            for arrays in (checkpoint.model, checkpoint.optimizer):
                if isinstance(arrays, Gathered):
                    arrays.drain()

        if not distributed.is_main():
            drain()
        on_rank_0(write)

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
        token = on_rank_0(partial(secrets.token_hex, 4))
        temporary = self.directory / f"{TEMPORARY}step-{step:08d}-{token}"
        # Of replicas one writes, on each machine.
        places = distributed.all_gather_json(layout.place)
        writer = next(sharer for sharer in self._sharers if places[sharer] == layout.place)
        name = layout.file_of(layout.place)

        def write() -> dict[str, str]:
            temporary.mkdir(exist_ok=True)
            if writer != rank:
                return {}
            return {name: _write_pieces(temporary / name, checkpoint, step)}

        def publish() -> None:
            if rank != leader:
                return
            content = self._content(checkpoint, step, checksums)
            content["shards"] = layout.as_json()
            folder = self._publish(temporary, step, content)
            self._point_to(folder, best)
            self._prune(keep)

        # First all pieces are on disk, then one process per machine gives the folder its name: a
        # process that fails takes its part away, and the run's last checkpoint stays the newest.
        try:
            written = distributed.all_gather_json(_writing(write, temporary / name))
            checksums = {key: value for found in written for key, value in found.items()}
            _writing(publish, temporary / _STATE)
        except UserError:
            if rank == leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def save_cut(self, checkpoint: Checkpoint, processes: int, *, step: int) -> Path:
        """Write a checkpoint of whole tensors in shards, of the model alone; one tensor after the
        other is read. Errors as those of `save`."""
        self.claim()
        shapes = {name: tuple(array.shape) for name, array in checkpoint.model.items()}
        metadata = {"step": str(step), "model": checkpoint.name}
        with self._new_folder(step) as temporary:
            checksums = {}
            for place in range(processes):
                layout = ShardLayout.even(processes, place, shapes)
                pieces = OwnPieces(checkpoint.model, layout, MODEL)
                lengths = (length for _, length in layout.groups.values())
                kinds = {
                    name: (np.dtype(np.float32), (length,))
                    for name, length in zip(pieces, lengths, strict=True)
                }
                file = temporary / layout.file_of(place)
                read = pieces.__getitem__
                checksums[file.name] = write_safetensors(file, kinds, read, metadata)
            content = self._content(checkpoint, step, checksums)
            return self._publish(temporary, step, {**content, "shards": layout.as_json()})

    def _find_sharers(self) -> None:
        """Which processes see this folder: those whose marks are in it."""
        token = on_rank_0(partial(secrets.token_hex, 4))

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
            _writing(part, self.directory)

    def _point_to(self, folder: Path, best: bool) -> None:
        pointer = f"{folder.name}\n".encode()
        replace_file(self.directory / "latest", pointer)
        if best:
            replace_file(self.directory / "best", pointer)

    def steps(self) -> set[int]:
        return {step for folder in _step_folders(self.directory) if (step := step_of(folder))}

    def best(self) -> Path | None:
        try:
            folder = self.directory / (self.directory / "best").read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() and folder != self.directory else None

    def close(self) -> None:
        """Let another run write to the folder; the end of the process does it too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def _new_folder(self, step: int) -> Iterator[Path]:
        """A hidden folder to write into, which is gone after an error."""
        prefix = f"{TEMPORARY}step-{step:08d}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=self.directory))
        try:
            yield temporary
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
        # The state is written last and names the checksums of the other files: a folder without it
        # is not a checkpoint, and one that a crash left behind is never taken for one.
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
        if self.keep_last is None:
            return
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
        """Hold DIR/.lock until `close` or the process's end."""
        if self._lock is None:
            self._lock = take_lock(self.directory / ".lock")
        if self._lock is None:
            raise CheckpointError(
                f"another run is writing checkpoints to {self.directory}; wait for it to end "
                "or choose another output folder"
            )


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint, as one process: see `_folders_at`. CheckpointError if there is none, or it
    is damaged."""
    folders, problems = _folders_at(Path(path)), []
    for folder in folders:
        try:
            content = _state_of(folder)
            _verify_files(folder, content)
            found = _opened(folder, content)
            if found.layout is None:
                found.model, found.optimizer = dict(found.model), dict(found.optimizer)
            return found
        except DamagedError as error:
            problems.append(_passed_over(error, folders))
    raise _none_whole(folders, problems) if folders else _nothing_at(Path(path))


def _folders_at(path: Path) -> list[Path]:
    """The checkpoints that a path names, newest first: one folder; those in a folder of several, or
    of a run; or what a `latest` or `best` file names. CheckpointError if it is another file."""
    if path.name in ("latest", "best") and path.is_file():
        path = path.with_name(path.read_text().strip())
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder that holds {_STATE} and {_MODEL}"
        )
    if path.name.startswith("step-") or (path / _STATE).exists():
        return [path] if path.is_dir() else []
    inside = checkpoint_folder(path)
    return _step_folders(inside if inside.is_dir() else path)


def _nothing_at(path: Path) -> CheckpointError:
    if not path.is_dir():
        return CheckpointError(f"no checkpoint at {path}: no such folder")
    return CheckpointError(f"no checkpoint in {path}: it has no folder named step-*")


def _passed_over(error: DamagedError, folders: Sequence[Path]) -> str:
    """Why one of them is; a warning says it where there are others."""
    if len(folders) > 1:
        logger.warning("checkpoint passed over: %s", error)
    return str(error)


def _none_whole(folders: Sequence[Path], problems: Sequence[str]) -> CheckpointError:
    if len(folders) == 1:
        return DamagedError(problems[0])
    return CheckpointError(
        f"none of the {len(folders)} checkpoints in {folders[0].parent} is intact; the newest: "
        f"{problems[0]}; or start afresh in another output folder"
    )


def _opened(folder: Path, content: Mapping[str, Any]) -> Checkpoint:
    """What a verified folder holds. Arrays of shards are read when they are asked for."""
    layout = ShardLayout.of_json(content["shards"]) if "shards" in content else None
    arrays: list[Mapping[str, np.ndarray]]
    if layout is not None:
        arrays = [ShardedArrays(folder, layout, MODEL), ShardedArrays(folder, layout)]
    else:
        arrays = [FileArrays(folder / name) for name in (_MODEL, _OPTIMIZER)]
    return Checkpoint(arrays[0], arrays[1], content["state"], content["name"], folder, layout)


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
    content = content_of(folder)
    return 0 if content is None else int(content["serial"])


def _write_pieces(path: Path, checkpoint: Checkpoint, step: int) -> str:
    """One process's pieces, and what is not cut."""
    arrays = {f"{MODEL}/{name}": array for name, array in checkpoint.model.items()}
    arrays |= checkpoint.optimizer
    return _write_arrays(path, arrays, {"step": str(step), "model": checkpoint.name})


def _write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> str:
    if isinstance(arrays, Gathered):
        kinds = arrays.kinds()
    else:
        kinds = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return write_safetensors(path, kinds, arrays.__getitem__, metadata or {})


def _writing(part: Callable[[], T], file: Path) -> T:
    """What this process's `part` returns; an error on all where one could not write."""

    def guarded() -> T:
        try:
            return part()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint could not be written on {socket.gethostname()}, "
                f"{error.filename or file}: {_why(error)}"
            ) from error

    return everywhere(guarded)


def _why(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space or choose another output folder; " if full else ""
    return f"{error.strerror or error}; {hint}earlier checkpoints are intact"


def _state_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, verified. CheckpointError if that is damaged, or newer than
    this version."""
    with _reading(folder):
        record = json.loads((folder / _STATE).read_bytes())
        version = record["format"]
        if isinstance(version, int) and version > _FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {version}, newer than {_FORMAT} that this version "
                "of oneflow_accel reads; upgrade it"
            )
        content: dict[str, Any] = record["content"]
        if record["sha256"] != _checksum(content):
            raise _damaged(folder / _STATE, "its content does not match its checksum")
        if "shards" in content:
            ShardLayout.of_json(content["shards"])
        return content


def _verify_files(
    folder: Path, content: Mapping[str, Any], names: Collection[str] | None = None
) -> None:
    """Check the content of these files of a checkpoint, None for all, without keeping it."""
    checksums = content["files"]
    wanted = checksums if names is None else names
    with _reading(folder):
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if missing and "shards" in content:
            raise _damaged(folder, _where_shards_are(missing))
        for name in wanted:
            if sha256_of(folder / name) != checksums[name]:
                raise _damaged(folder / name, _what_it_is(folder / name, content["step"]))


def _where_shards_are(missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if missing[4:] else "")
    return f"{shown} missing: copy them here from the machines whose processes wrote them"


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Inside, what shows that a checkpoint is damaged is a DamagedError."""
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(Path(error.filename), "the file is missing") from error
    except OSError as error:
        raise _damaged(folder, f"it cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder / _STATE, "it is not a checkpoint's state") from error


def _what_it_is(path: Path, step: int) -> str:
    """What is wrong with a shard whose checksum is not that of its checkpoint."""
    try:
        theirs = FileArrays(path).metadata.get("step", str(step))
    except CheckpointError:
        theirs = str(step)
    if theirs != str(step):
        return f"it is of step {theirs}, the checkpoint of step {step}"
    return "its content does not match its checksum"


class DamagedError(CheckpointError):
    """A checkpoint is not whole; another may be."""


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{path} is damaged ({why}); resume from another checkpoint")


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


def agreed_checkpoint(
    resume: str | None,
    output_dir: Path,
    mesh: Mesh | None = None,
    *,
    whole: Sequence[str] = (MODEL,),
    reshard: bool = True,
    epoch: int | None = None,
    lazily: bool = False,
) -> Checkpoint | None:
    """The checkpoint that a user asked to resume from, the same for all processes of a job, also
    where each machine has a disk of its own; None where none was asked for. A collective call.

    What the first process that has any finds, the others get: a checkpoint of whole tensors, or the
    state of one in shards, of which each reads its own. On a common disk each file is read once.

    Args:
        resume: a checkpoint's folder, one of several or of a run; "auto" is `output_dir`, and None
            is returned where that has none.
        mesh: how this job cuts a model. A checkpoint that was cut alike needs a process's own shard
            on its machine; of any other all shards must be there.
        whole: what of one in shards each process has whole: the model's tensors, before they are
            cut, and in place of the optimizer's arrays those of a key such as "ema".
        reshard: take one that was cut over another number of processes, too.
        epoch: take the one of this epoch only, counted from 1.
        lazily: to read an array of a checkpoint of whole tensors is a collective call.

    Raises:
        UserError: there is none, or of the epoch, or none is intact, or the newest is of a newer
            format, or was cut over another number of processes.
    """
    if resume is None:
        return None
    path = checkpoint_folder(output_dir) if resume == AUTO_RESUME else Path(resume)
    own = everywhere(lambda: _folders_at(path))
    lists = distributed.all_gather_json([str(folder) for folder in own])
    leader = next((rank for rank, found in enumerate(lists) if found), 0)
    folders, problems, epochs = [Path(text) for text in lists[leader]], [], set()
    for folder in folders:
        try:
            content = on_rank_0(partial(_state_of, folder), rank=leader)
            mine, state = _same(folder, content, own), content["state"]
            if epoch is not None and (state.get("epoch"), state.get("batch")) != (epoch, 0):
                epochs.add(state.get("epoch"))
            elif "shards" in content:
                return _agreed_shards(mine, content, mesh, whole=whole, reshard=reshard)
            else:
                return _sent(folder, mine, content, leader, lazily=lazily)
        except DamagedError as error:
            problems.append(_passed_over(error, folders))
    if problems:
        raise _none_whole(folders, problems)
    if epoch is not None:
        there = ", ".join(map(str, sorted(epochs))) or "none"
        raise CheckpointError(
            f"no checkpoint of epoch {epoch} in {path}; here are those of {there}"
        )
    if resume != AUTO_RESUME:
        raise _nothing_at(path)
    logger.info("no checkpoint in %s yet: starting from the beginning", output_dir)
    return None


def _same(folder: Path, content: Mapping[str, Any], own: Sequence[Path]) -> Path:
    """A checkpoint on this process's machine, `own` being those there. A folder of its name may be
    of another save: one that was killed before all machines had it."""
    named = [each for each in own if each.name == folder.name]
    for each in (*named, *own):
        theirs = content_of(each)
        if theirs is not None and theirs["files"] == content["files"]:
            return each
    return named[0] if named else folder


def _sent(
    folder: Path, mine: Path, content: Mapping[str, Any], leader: int, *, lazily: bool
) -> Checkpoint:
    """A checkpoint of whole tensors, from the process that has it to all, one after the other."""
    if distributed.rank() != leader:
        own = Checkpoint({}, {}, content["state"], content["name"], mine)

    def read() -> list[list[str]]:
        nonlocal own
        _verify_files(folder, content)
        own = _opened(folder, content)
        return [list(own.model), list(own.optimizer)]

    model, optimizer = on_rank_0(read, rank=leader)
    own.model = Spread(own.model, model, leader)
    own.optimizer = Spread(own.optimizer, optimizer, leader)
    if not lazily:
        own.model, own.optimizer = dict(own.model), dict(own.optimizer)
    return own


def _agreed_shards(
    mine: Path,
    content: Mapping[str, Any],
    mesh: Mesh | None,
    *,
    whole: Sequence[str],
    reshard: bool,
) -> Checkpoint:
    """A checkpoint in shards, each verified by a process that needs it, one on a common disk."""
    theirs, rank = int(content["shards"]["processes"]), distributed.rank()
    alike = mesh is not None and mesh.shards == theirs
    if not (alike or reshard):
        raise UserError(
            f"{mine} was written by {theirs} processes and this job cuts the model over "
            f"{mesh.shards if mesh else 1}: start {theirs}, or allow another number with --reshard"
        )
    layout = ShardLayout.of_json(content["shards"], mesh.place if alike and mesh else 0)
    names = [layout.file_of(place) for place in range(theirs)]
    wanted = [names[layout.place]] if alike else names
    marks_of = distributed.all_gather_json({name: _mark(mine / name) for name in names})

    def is_mine_to_read(name: str) -> bool:
        """Those that see the same file take turns; what is not there each of them misses."""
        mark = marks_of[rank][name]
        same = [other for other, marks in enumerate(marks_of) if marks[name] == mark]
        return alike or mark is None or same[names.index(name) % len(same)] == rank

    problem = None
    try:
        _verify_files(mine, content, list(filter(is_mine_to_read, wanted)))
    except DamagedError as error:
        problem = f"on {socket.gethostname()}: {error}"
    # Not `everywhere`: of a DamagedError the caller goes on to an older checkpoint.
    problems = [text for text in distributed.all_gather_json(problem) if text is not None]
    if problems:
        raise DamagedError(problems[0])
    checkpoint = _opened(mine, content)
    if any(mark is None for marks in marks_of for mark in marks.values()):
        own = FileArrays(mine / wanted[0])
        for key in whole:
            parts = [on_rank_0(partial(_of_key, own, key), rank=place) for place in range(theirs)]
            arrays = joined(parts, layout) if parts[0] else {}
            if key == MODEL:
                checkpoint.model = arrays
            else:
                checkpoint.optimizer = {f"{key}/{name}": array for name, array in arrays.items()}
    return checkpoint


def _mark(file: Path) -> list[int] | None:
    """What tells a file from a copy on another machine's disk; None where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def _of_key(arrays: Mapping[str, np.ndarray], key: str) -> dict[str, np.ndarray]:
    prefix = f"{key}/"
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


def content_of(folder: Path) -> dict[str, Any] | None:
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


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of a run that was saved last, intact or not; None without one."""
    return next(iter(_step_folders(checkpoint_folder(run_dir))), None)


def read_model(path: Path) -> Mapping[str, np.ndarray]:
    """The model's tensors of one checkpoint, verified. CheckpointError if it is damaged."""
    content = _state_of(path)
    _verify_files(path, content, None if "shards" in content else [_MODEL])
    return _opened(path, content).model


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one."""
    return (path / _STATE).is_file()


def way_on(folder: Path, resume: str) -> str:
    """A sentence without its full stop: what to do after the run in a folder was interrupted."""
    found = sorted(path.name for path in checkpoint_folder(folder).glob("step-*"))
    if not found:
        return f"no checkpoint was written to {folder}"
    return f"the newest checkpoint in {folder} is {found[-1]}: continue with {resume}"


def claimed(
    run_dir: Path, resumed: Checkpoint | None, *, keep_last: int | None = 3, by_all: bool = False
) -> CheckpointManager:
    """The checkpoints of a run that begins, or goes on from `resumed`, held against other runs by
    the main process. `by_all`: each process writes. A collective call; errors are those of `claim`
    and of `require_no_other_run`, on all processes."""
    manager = CheckpointManager(checkpoint_folder(run_dir), keep_last)

    agree = everywhere if by_all else on_rank_0
    agree(lambda: require_no_other_run(run_dir, None if resumed is None else resumed.folder))
    on_rank_0(manager.claim)
    return manager


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
    of_libai = sorted(path for path in folder.glob("model_[0-9]*") if path.is_dir())
    if of_libai:
        return of_libai[-1]
    # A run that has ended, and whose checkpoints were taken away. One that was killed before its
    # first checkpoint has nothing to lose.
    ended = (folder / JSONL_NAME, folder / CURVES_NAME)
    return ended[0] if all(path.exists() for path in ended) else None
