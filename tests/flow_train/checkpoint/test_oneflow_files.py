"""Folders of oneflow.save: both ways against oneflow itself; what is refused; what is noticed."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint import oneflow_files

PLACED = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}


def placed(array: np.ndarray) -> flow.Tensor:
    return flow.tensor(array, **PLACED)


@pytest.fixture
def value() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    layer = flow.nn.Linear(3, 4).to_global(**PLACED)
    shared = placed(rng.normal(size=(2, 3)))
    return {
        "model": layer.state_dict(),
        "pair": (shared, [shared, placed(np.arange(5, dtype=np.int64))]),
        "numbers": {"lr": 0.1, "betas": (0.9, 0.95), 3: None, "text": "ü", "flag": True},
        "scalar": placed(np.float32(2.5)),
        "empty": placed(np.zeros((0, 2), np.float32)),
    }


def flat(node: Any) -> Any:
    """The same with numpy arrays, to be compared."""
    if isinstance(node, flow.Tensor):
        array = node.numpy()
        return (array.dtype.str, array.shape, array.tobytes())
    if isinstance(node, dict):
        return {key: flat(entry) for key, entry in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(flat(entry) for entry in node)
    return node


def test_oneflow_reads_what_we_write_and_we_what_oneflow_writes(
    value: dict[str, Any], tmp_path: Path
) -> None:
    oneflow_files.save(value, tmp_path / "ours")
    flow.save(value, tmp_path / "theirs", global_dst_rank=0)
    expected = flat(value)
    assert flat(flow.load(tmp_path / "ours", global_src_rank=0)) == expected
    assert flat(oneflow_files.load(tmp_path / "theirs")) == expected
    loaded = oneflow_files.load(tmp_path / "ours")
    assert flat(loaded) == expected
    assert isinstance(loaded["model"], OrderedDict)
    assert loaded["pair"][0] is loaded["pair"][1][0]


def test_arrays_can_be_read_without_a_tensor(value: dict[str, Any], tmp_path: Path) -> None:
    flow.save(value, tmp_path / "x", global_dst_rank=0)
    stored = oneflow_files.read_structure(tmp_path / "x")["model"]["weight"]
    array = oneflow_files.read_array(tmp_path / "x", stored)
    assert np.array_equal(array, value["model"]["weight"].numpy())


class Evil:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = (call, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "marker"
    folder.mkdir()
    content = {"protocol_version": 1, "data": Evil(Path.touch, marker)}
    (folder / "pickled_data").write_bytes(pickle.dumps(content))
    flow.load(folder)
    assert marker.exists(), "oneflow runs it, so this test tests something"
    marker.unlink()
    for call in (oneflow_files.load, oneflow_files.check, oneflow_files.read_structure):
        with pytest.raises(CheckpointError, match="wants to run `pathlib"):
            call(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../tensor_1", "/etc", "tensor_1/../../x", 7, None])
def test_tensor_folders_cannot_lead_out(tmp_path: Path, name: Any) -> None:
    flow.save({"x": placed(np.ones(3))}, tmp_path / "x", global_dst_rank=0)
    content = {"protocol_version": 1, "data": Evil(flow.Tensor, name)}
    (tmp_path / "x" / "pickled_data").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="corrupt"):
        oneflow_files.load(tmp_path / "x")


def tensor_folder(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.is_dir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "pickled_data").unlink(), "pickled_data cannot be read"),
        (lambda folder: (folder / "pickled_data").write_bytes(b"\x80\x04"), "truncated or corrupt"),
        (lambda folder: (tensor_folder(folder) / "out").unlink(), "out is missing"),
        (lambda folder: (tensor_folder(folder) / "meta").unlink(), "meta is missing"),
        (lambda folder: (tensor_folder(folder) / "out").write_bytes(b"1"), r"\(1 bytes\) is trunc"),
        (lambda folder: (tensor_folder(folder) / "meta").write_text("?"), "meta is corrupt"),
    ],
)
def test_damage_is_named(value: dict[str, Any], tmp_path: Path, damage: Any, message: str) -> None:
    oneflow_files.save(value, tmp_path / "x")
    damage(tmp_path / "x")
    for call in (oneflow_files.load, oneflow_files.check):
        with pytest.raises(CheckpointError, match=message):
            call(tmp_path / "x")


def test_a_list_that_holds_itself_ends(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    oneflow_files.save(loop, tmp_path / "x")
    loaded = oneflow_files.load(tmp_path / "x")
    assert loaded[0] == 1
    assert loaded[1] is loaded


@pytest.mark.parametrize("value", [np.float64(1), Path("x"), np.ones(2)])
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="only tensors, containers, numbers and text"):
        oneflow_files.save({"x": value}, tmp_path / "x")
    assert not (tmp_path / "x" / "pickled_data").exists()


def test_no_place_to_write_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        oneflow_files.save({"x": placed(np.ones(3))}, tmp_path / "file" / "x")
