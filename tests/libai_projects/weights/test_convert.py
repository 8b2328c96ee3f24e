"""The converter as a person runs it: round trips, what it lists, what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager
from libai_projects.weights import convert
from tests.launch import REPOSITORY, run_process

GOLDEN = REPOSITORY / "tests" / "data" / "hf_gpt2"


def converted(*args: str | Path) -> int:
    return convert.main([str(arg) for arg in args])


def assert_same_weights(folder: Path, golden: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, golden))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = GOLDEN / "safetensors"
    assert converted(golden, tmp_path / "libai", "--from", "huggingface", "--to", "libai") == 0
    assert "weights" in capsys.readouterr().out
    back = ("--from", "libai", "--to", "huggingface")
    assert converted(tmp_path / "libai", tmp_path / "hf", *back) == 0
    assert_same_weights(tmp_path / "hf", golden)
    # The inner folder is what --load_weight names; a second time needs --force.
    assert converted(tmp_path / "libai" / "model", tmp_path / "hf", *back) == 2
    assert "--force" in capsys.readouterr().err
    assert converted(tmp_path / "libai" / "model", tmp_path / "hf", *back, "--force") == 0


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "bin_sharded", source)
    (source / "merges.txt").write_text("#version: 0.2\n")
    options = ("--from", "huggingface", "--to", "huggingface")
    assert converted(source, tmp_path / "out", *options) == 0
    assert (tmp_path / "out" / "merges.txt").read_text() == "#version: 0.2\n"
    assert_same_weights(tmp_path / "out", GOLDEN / "safetensors")


def test_partial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "safetensors", source)
    state = load_file(source / "model.safetensors")
    del state["transformer.ln_f.bias"]
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:20].copy()
    state["score.weight"] = np.zeros((2, 16), np.float32)
    save_file(state, source / "model.safetensors")
    options = ("--from", "huggingface", "--to", "huggingface")
    listing = (
        "missing (1):\n  ln_f.bias\nunexpected (1):\n  score.weight\n"
        "mis-shaped (1):\n  wpe.weight: (20, 16), expected (24, 16)\n"
    )
    assert converted(source, tmp_path / "out", *options) == 2
    assert listing in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert converted(source, tmp_path / "out", *options, "--partial") == 0
    assert listing in capsys.readouterr().out
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(state) - set(written) == {"transformer.wpe.weight", "score.weight"}


def test_what_a_checkpoint_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_libai = ("--from", "huggingface", "--to", "libai", "--vocab-multiple", "1")
    assert converted(GOLDEN / "safetensors", tmp_path / "libai", *to_libai) == 0
    (tmp_path / "libai" / "model" / "libai_config.json").unlink()
    back = ("--from", "upstream", "--to", "huggingface")
    assert converted(tmp_path / "libai", tmp_path / "hf", *back) == 2
    assert "give --heads" in capsys.readouterr().err
    assert converted(tmp_path / "libai", tmp_path / "hf", *back, "--heads", "4") == 0
    assert_same_weights(tmp_path / "hf", GOLDEN / "safetensors")


def test_source_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "safetensors", source)
    options = ("--from", "huggingface", "--to", "libai", "--force")
    for target in (source, tmp_path):
        assert converted(source, target, *options) == 2
        assert "is or contains the source" in capsys.readouterr().err


def test_what_can_be_resumed_is_a_run_of_libai(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumable = ("--to", "libai", "--resumable", "eager", "--from")
    assert converted(GOLDEN / "safetensors", tmp_path / "out", *resumable, "huggingface") == 2
    assert "--resumable goes with --from libai --to libai" in capsys.readouterr().err
    assert converted(GOLDEN / "safetensors", tmp_path / "out", *resumable, "libai") == 2
    assert "it has no folder named step-*" in capsys.readouterr().err
    manager = CheckpointManager(tmp_path / "images")
    manager.save(Checkpoint({}, state={"step": 1, "train_step": {}}), step=1)
    manager.close()
    assert converted(tmp_path / "images", tmp_path / "out", *resumable, "libai") == 2
    assert "is not a checkpoint of a LiBai run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command_line(tmp_path: Path) -> None:
    args = [tmp_path, tmp_path / "out", "--from", "huggingface", "--to", "libai"]
    result = run_process(["-m", "libai_projects.weights.convert", *args])
    assert result.returncode == 2
    assert "convert: error:" in result.stdout
    assert "Traceback" not in result.stdout
