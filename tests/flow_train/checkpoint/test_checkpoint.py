"""Checkpoints survive kills, damage and full disks, and give back exactly what was saved."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import tracemalloc
from pathlib import Path

from oneflow_accel.collectives import Mesh
from oneflow_accel.errors import CheckpointError

import numpy as np
import pytest

from flow_train import files
from flow_train.checkpoint import folders
from flow_train.checkpoint.folders import (
    Checkpoint,
    CheckpointManager,
    agreed_checkpoint,
    read_checkpoint,
)

FORK = multiprocessing.get_context("fork")


def make(step: int, size: int = 1000) -> Checkpoint:
    """A checkpoint whose every value follows from `step`."""
    return Checkpoint(
        model={"conv.weight": np.full((size, 3), step, np.float32)},
        optimizer={"momentum_buffer/conv.weight": np.full((size, 3), -step, np.float32)},
        state={"step": step, "epoch": step // 10},
        name="resnet18",
    )


def assert_is(checkpoint: Checkpoint, step: int) -> None:
    expected = make(step, len(checkpoint.model["conv.weight"]))
    assert checkpoint.state == expected.state
    for part in ("model", "optimizer"):
        actual, wanted = getattr(checkpoint, part), getattr(expected, part)
        assert actual.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(actual[name], wanted[name])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_gives_back_every_bit(tmp_path):
    rng = np.random.default_rng(0)
    model = {
        "float16": rng.standard_normal(7).astype(np.float16),
        "not_contiguous": rng.standard_normal((4, 6)).T,
        "special": np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 2), np.float32),
        "bool": np.array([True, False]),
    }
    state = {
        "big": 2**200 + 1,
        "pi": 0.1 + 0.2,
        "nested": [{"a": [None, True, "\u00e9"]}],
        "n": -0.0,
    }
    path = CheckpointManager(tmp_path / "new" / "folder").save(
        Checkpoint(model, {}, state, "resnet50"), step=7
    )
    assert path.name == "step-00000007"
    loaded = read_checkpoint(path)
    assert (loaded.name, loaded.optimizer, loaded.state) == ("resnet50", {}, state)
    assert math.copysign(1, loaded.state["n"]) == -1
    assert loaded.model.keys() == model.keys()
    for name, array in model.items():
        found = loaded.model[name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


def test_writing_takes_no_memory(tmp_path):
    arrays = {str(number): np.ones(1 << 19, np.float32) for number in range(8)}
    tracemalloc.start()
    try:
        CheckpointManager(tmp_path).save(Checkpoint(arrays, arrays, {}, "vit"), step=1)
        assert tracemalloc.get_traced_memory()[1] < arrays["0"].nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": [{"b": np.float64(1)}]}])
def test_state_that_json_would_change_is_refused(tmp_path, state):
    with pytest.raises(TypeError, match=r"^state"):
        CheckpointManager(tmp_path).save(Checkpoint({}, {}, state), step=1)
    assert names(tmp_path) == []


def test_keeps_the_last_ones_and_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(1, 7):
        manager.save(make(step), step=step, best=step == 2)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000005", "step-00000006"]
    assert (tmp_path / "latest").read_text() == "step-00000006\n"
    assert read_checkpoint(tmp_path).folder == tmp_path / "step-00000006"
    assert manager.best() == tmp_path / "step-00000002"
    manager.save(make(7), step=7, best=True)
    assert names(tmp_path) == ["best", "latest", "step-00000006", "step-00000007"]


def test_newest_is_what_was_saved_last_not_the_highest_step(tmp_path):
    """A run resumed from an earlier step overtakes the steps of its abandoned future."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20, 30, 15):
        path = manager.save(make(step), step=step)
    assert read_checkpoint(tmp_path).folder == path == tmp_path / "step-00000015"
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000030"]
    # A step that is saved again replaces nothing.
    again = manager.save(make(16), step=15)
    assert again != path
    assert_is(read_checkpoint(path), 15)
    assert_is(read_checkpoint(tmp_path), 16)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", flip_bit),
        ("optimizer.safetensors", flip_bit),
        ("state.json", flip_bit),
        ("state.json", truncate),
        ("model.safetensors", lambda path: os.truncate(path, 0)),
        ("optimizer.safetensors", os.unlink),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_used(tmp_path, caplog, file, damage):
    manager = CheckpointManager(tmp_path, keep_last=2)
    before = manager.save(make(1), step=1)
    newest = manager.save(make(2), step=2)
    damage(newest / file)
    with caplog.at_level(logging.WARNING, logger="oneflow_accel"):
        assert read_checkpoint(tmp_path).folder == before
    assert str(newest / file) in caplog.text
    assert_is(read_checkpoint(tmp_path), 1)
    with pytest.raises(CheckpointError, match=file):
        read_checkpoint(newest)
    # Damage everywhere is an error, not a fresh start.
    flip_bit(before / "model.safetensors")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        read_checkpoint(tmp_path)


def test_damaged_ones_do_not_push_out_good_ones(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    truncate(manager.save(make(1), step=1) / "state.json")
    manager.save(make(2), step=2)
    assert read_checkpoint(tmp_path).folder == tmp_path / "step-00000002"


def test_newer_format_is_refused_by_name(tmp_path):
    """An older step beside it is not gone on from: that would undo what a newer version trained."""
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(make(1), step=1)
    path = manager.save(make(2), step=2)
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(record | {"format": 99}))
    for read in (
        lambda: read_checkpoint(path),
        lambda: read_checkpoint(tmp_path),
        lambda: agreed_checkpoint("auto", tmp_path),
    ):
        with pytest.raises(CheckpointError, match="step-00000002 has checkpoint format 99, newer"):
            read()


def test_of_shards_a_process_reads_its_own(tmp_path, monkeypatch):
    """Where all are on one disk, too."""
    CheckpointManager(tmp_path / "checkpoints").save_cut(make(1), 4, step=1)
    read = []

    def sha256_of(path: Path) -> str:
        read.append(path.name)
        return files.sha256_of(path)

    monkeypatch.setattr(folders, "sha256_of", sha256_of)
    assert agreed_checkpoint("auto", tmp_path, Mesh(4)).layout is not None
    assert read == ["shard-00000-of-00004.safetensors"]


def test_read_checkpoint_finds_it_by_any_name(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(make(step), step=step, best=step == 1)
    for name, step in (("step-00000001", 1), ("best", 1), ("latest", 2), ("", 2)):
        assert_is(read_checkpoint(tmp_path / name), step)
    assert_is(read_checkpoint(str(tmp_path)), 2)


def test_what_is_no_checkpoint_is_named(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no such folder"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"weights\.pth is a file"):
        read_checkpoint(file)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        read_checkpoint(tmp_path)
    assert CheckpointManager(tmp_path).best() is None
    with pytest.raises(CheckpointError, match="cannot be written to"):
        CheckpointManager(file / "checkpoints").save(make(1), step=1)


@pytest.mark.parametrize("failing_sync", range(7))
def test_full_disk_leaves_the_previous_one(tmp_path, monkeypatch, failing_sync):
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(make(1), step=1, best=True)
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == failing_sync + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left on device; free some space"):
        manager.save(make(2), step=2, best=True)
    monkeypatch.undo()
    newest = read_checkpoint(tmp_path)
    assert_is(newest, newest.state["step"])
    assert_is(read_checkpoint(tmp_path / "step-00000001"), 1)
    assert not list(tmp_path.glob(".tmp-*"))
    manager.save(make(3), step=3)
    assert_is(read_checkpoint(tmp_path), 3)


OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")


def save_and_die(directory: Path, operation: int) -> None:
    """Save step 3, killed right before the given file system operation in `directory`."""
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        # Relative names are rmtree's.
        inside = args and (str(directory) in str(args[0]) or not os.path.isabs(str(args[0])))
        if event in OPERATIONS and inside:
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    manager = CheckpointManager(directory, keep_last=1)
    sys.addaudithook(hook)
    manager.save(make(3), step=3, best=True)


def test_kill_before_each_file_operation(tmp_path):
    before = tmp_path / "before"
    with contextlib.closing(CheckpointManager(before, keep_last=2)) as manager:
        for step in (1, 2):
            manager.save(make(step), step=step, best=True)
    for operation in range(200):
        directory = tmp_path / str(operation)
        shutil.copytree(before, directory)
        process = FORK.Process(target=save_and_die, args=(directory, operation))
        process.start()
        process.join(60)
        latest = read_checkpoint(directory)
        assert latest.state["step"] in (2, 3)
        assert_is(latest, latest.state["step"])
        for folder in directory.glob("step-*"):
            assert_is(read_checkpoint(folder), int(folder.name[5:]))
        with contextlib.closing(CheckpointManager(directory, keep_last=2)) as manager:
            assert manager.best() is not None
            # What a kill has left goes with the next save.
            manager.save(make(4), step=4)
        assert not list(directory.glob(".t*"))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    assert operation > 15


def hold(directory: Path, ready, done) -> None:
    """And leave a worker behind, as a run that is killed does."""
    manager = CheckpointManager(directory)
    manager.claim()
    worker = os.fork()
    if worker == 0:
        done.wait(30)
        time.sleep(1)
        os._exit(0)
    ready.set()
    done.wait(30)
    os._exit(0)


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    ready, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(30)
    with pytest.raises(CheckpointError, match="another run is writing"):
        CheckpointManager(tmp_path).save(make(1), step=1)
    done.set()
    # With a time limit it would wait for the worker, too.
    process.join()
    CheckpointManager(tmp_path).save(make(1), step=1)
