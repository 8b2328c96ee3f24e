"""Folders of oneflow.save: what oneflow wrote; what is refused; what is noticed."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from libai_projects.weights import oneflow_files
from libai_projects.weights.oneflow_files import StoredTensor

PLACED = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}


def placed(array: np.ndarray) -> flow.Tensor:
    return flow.tensor(array, **PLACED)


def save(value: Any, folder: Path) -> Path:
    flow.save(value, folder, global_dst_rank=0)
    return folder


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


def flat(node: Any, folder: Path) -> Any:
    """The same with numpy arrays, to be compared."""
    if isinstance(node, flow.Tensor | StoredTensor):
        is_stored = isinstance(node, StoredTensor)
        array = oneflow_files.read_array(folder, node) if is_stored else node.numpy()
        return (array.dtype.str, array.shape, array.tobytes())
    if isinstance(node, dict):
        return {key: flat(entry, folder) for key, entry in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(flat(entry, folder) for entry in node)
    return node


def test_what_oneflow_writes_is_read(value: dict[str, Any], tmp_path: Path) -> None:
    folder = save(value, tmp_path / "x")
    found = oneflow_files.read_structure(folder)
    assert flat(found, folder) == flat(value, folder)
    assert isinstance(found["model"], OrderedDict)
    assert found["pair"][0] is found["pair"][1][0]
    oneflow_files.check(folder)


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
    for call in (oneflow_files.check, oneflow_files.read_structure):
        with pytest.raises(CheckpointError, match="wants to run `pathlib"):
            call(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../tensor_1", "/etc", 7])
def test_tensor_folders_cannot_lead_out(tmp_path: Path, name: Any) -> None:
    folder = save({"x": placed(np.ones(3))}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="corrupt"):
        oneflow_files.read_array(folder, StoredTensor(name))
    content = {"protocol_version": 1, "data": Evil(flow.Tensor, name)}
    (folder / "pickled_data").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="corrupt"):
        oneflow_files.check(folder)


def tensor_folder(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.is_dir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "pickled_data").unlink(), "pickled_data cannot be read"),
        (lambda folder: (folder / "pickled_data").write_bytes(b"\x80\x04"), "truncated or corrupt"),
        (lambda folder: (tensor_folder(folder) / "out").unlink(), "cannot be read: No such file"),
        (lambda folder: (tensor_folder(folder) / "out").write_bytes(b"1"), "out is truncated"),
        (lambda folder: (tensor_folder(folder) / "meta").write_text("?"), "meta is corrupt"),
    ],
)
def test_damage_is_named(value: dict[str, Any], tmp_path: Path, damage: Any, message: str) -> None:
    folder = save(value, tmp_path / "x")
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        oneflow_files.check(folder)


def test_a_list_that_holds_itself_ends(tmp_path: Path) -> None:
    loop: list[Any] = [placed(np.ones(3))]
    loop.append(loop)
    folder = save(loop, tmp_path / "x")
    oneflow_files.check(folder)
    found = oneflow_files.read_structure(folder)
    assert found[1] is found
