"""Shards become one file and shards again; what is missing or mixed is named."""

from __future__ import annotations

import shutil
from pathlib import Path

from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import pytest
import safetensors.numpy

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, read_checkpoint
from flow_train.checkpoint.shards import (
    FileArrays,
    OwnPieces,
    ShardedArrays,
    ShardLayout,
    Slot,
    write_safetensors,
)
from vit_10b import consolidate

SHAPES = {"pos": (1, 3, 5), "block.weight": (7, 5), "block.bias": (7,), "scale": (1,)}
STATE = {"step": 12, "epoch": 1, "batch": 0, "seed": 3, "config": {"norm_eps": {"norm": 1e-6}}}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def written(folder: Path, arrays: dict[str, np.ndarray], processes: int, step: int = 12) -> Path:
    manager = CheckpointManager(folder / "checkpoints")
    checkpoint = Checkpoint(arrays, {}, STATE | {"step": step}, name="vit")
    try:
        return manager.save_cut(checkpoint, processes, step=step)
    finally:
        manager.close()


@pytest.mark.parametrize("processes", [1, 3])
def test_there_and_back(tmp_path: Path, arrays: dict[str, np.ndarray], processes: int) -> None:
    folder = written(tmp_path / "cut", arrays, processes)
    assert consolidate.main(["--ckpt_prefix", str(folder)]) == 0
    file = folder.with_name("step-00000012_consolidated.safetensors")
    # As the library reads it, which did not write it.
    found = safetensors.numpy.load_file(file)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert "norm_eps" in FileArrays(file).metadata
    elsewhere = tmp_path / "elsewhere.safetensors"
    safetensors.numpy.save_file(arrays, elsewhere)
    for source, state in ((file, STATE), (elsewhere, consolidate.BEGINNING)):
        folder = tmp_path / source.stem
        back = ["--split", str(source), "--processes", "2", "--save_path", str(folder)]
        assert consolidate.main(back) == 0
        checkpoint = read_checkpoint(folder / "checkpoints")
        assert checkpoint.state == state
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.model[name], array)


@pytest.mark.parametrize(("given", "wanted"), [(1, 4), (3, 2), (2, 1)])
def test_flat_shards_are_cut_anew(
    tmp_path: Path, arrays: dict[str, np.ndarray], given: int, wanted: int
) -> None:
    """From shards of several tensors, padded to a multiple of 4, to those of one each."""
    slots = [Slot(name, shape) for name, shape in SHAPES.items()]
    length = -(-sum(slot.size for slot in slots) // (4 * given)) * 4
    for place in range(given):
        layout = ShardLayout(given, place, {"flat_shard": (slots, length)})
        pieces = OwnPieces(arrays, layout, "exp_avg")
        kinds = {name: (np.dtype(np.float32), (length,)) for name in pieces}
        write_safetensors(tmp_path / layout.file_of(place), kinds, pieces.__getitem__, {})
    whole = ShardedArrays(tmp_path, layout)
    assert set(whole) == {f"exp_avg/{name}" for name in SHAPES}
    for place in range(wanted):
        even = ShardLayout.even(wanted, place, SHAPES)
        ours, theirs = OwnPieces(whole, even), OwnPieces(arrays, even)
        for name in SHAPES:
            np.testing.assert_array_equal(ours[f"exp_avg/{name}"], theirs[name])


def test_what_is_wrong_is_named(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    folder = written(tmp_path / "a", arrays, 3)
    other = written(tmp_path / "b", arrays, 3, step=24)
    shard = folder / "shard-00001-of-00003.safetensors"
    run = lambda *more: consolidate.run(["--ckpt_prefix", str(folder), *more])  # noqa: E731
    kept = shard.read_bytes()
    shutil.copy(other / shard.name, shard)
    with pytest.raises(CheckpointError, match="it is of step 24, the checkpoint of step 12"):
        run()
    shard.write_bytes(kept[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00003.*does not match"):
        run()
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00003.* missing: copy them"):
        run()
    shard.write_bytes(kept)
    shutil.copy(shard, folder / "shard-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="3 shards and 4 files"):
        run()
    with pytest.raises(CheckpointError, match=r"no state\.json"):
        consolidate.run(["--ckpt_prefix", str(tmp_path)])
    shutil.rmtree(other)
    shutil.copytree(written(tmp_path / "d", arrays, 3), folder, dirs_exist_ok=True)
    (folder / "shard-00003-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=f"--save_path {tmp_path} is a folder: name the file"):
        run("--save_path", str(tmp_path))
    with pytest.raises(UserError, match="--ckpt_prefix"):
        consolidate.run([])
    wrong = ["--split", str(folder / "state.json"), "--processes", "2"]
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        consolidate.run([*wrong, "--save_path", str(tmp_path / "c")])


def test_another_model_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    whole = read_checkpoint(written(tmp_path, arrays, 2))
    missing = OwnPieces(whole.model, ShardLayout.even(2, 0, {"neck": (3,)}))
    with pytest.raises(CheckpointError, match="the checkpoint has no neck"):
        missing.piece("", "neck")
    wider = OwnPieces(whole.model, ShardLayout.even(2, 0, {"scale": (3,)}))
    with pytest.raises(CheckpointError, match=r"shape \(1,\) in the checkpoint and \(3,\)"):
        wider["scale"]
