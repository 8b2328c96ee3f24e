"""read_weights on torch's files (golden/make_torch_checkpoints.py), damaged and hostile ones."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import pytest
from safetensors.numpy import save_file

from flow_train.checkpoint import torch_files
from flow_train.checkpoint.torch_files import Storage, StorageType, TensorView
from flow_train.checkpoint.weights import read_weights
from tests.torch_writer import save_torch_file

FOLDER = Path(__file__).resolve().parents[2] / "data" / "torch_checkpoints"
FLOAT = StorageType(np.dtype("<f4"))
HOLDS_ITSELF: dict[str, object] = {}
HOLDS_ITSELF["model"] = HOLDS_ITSELF


def expected(stem: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as arrays:
        prefix = f"{stem}/"
        return {
            name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)
        }


def assert_same_state(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(wanted)
    for name, array in wanted.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].flags.c_contiguous, name
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


WRITTEN = ("zip", "legacy", "views", "views_legacy", "dtypes", "dtypes_legacy", "parameters")


@pytest.mark.parametrize("stem", [*WRITTEN, "training", "model_key"])
def test_reads_what_torch_wrote(stem: str) -> None:
    assert_same_state(read_weights(FOLDER / f"{stem}.pth"), expected(stem))


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        ("runs_code", r"runs_code\.pth.*`posix\.system`.*save `model.state_dict"),
        ("runs_code_legacy", r"`posix\.system`"),
        ("whole_module", r"wants to run `torch\.nn\.modules\.linear\.Linear`"),
        ("not_a_state", r"holds a list, not a state dict"),
    ],
)
def test_code_and_other_content_is_refused_and_not_run(
    stem: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        read_weights(FOLDER / f"{stem}.pth")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stem", ["zip", "legacy", "training"])
def test_damage_never_escapes_as_another_error(stem: str, tmp_path: Path) -> None:
    whole = (FOLDER / f"{stem}.pth").read_bytes()
    path = tmp_path / "short.pth"
    for length in [*range(0, 64, 7), *range(64, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"short\.pth"):
            read_weights(path)
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[random.integers(len(whole))] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            read_weights(path)
        except UserError:
            refused += 1
    assert refused > 0


def rewrite_zip(target: Path, changes: dict[str, bytes | None], **options: int) -> None:
    """Copy zip.pth with some entries (named without their top folder) replaced or left out."""
    with zipfile.ZipFile(FOLDER / "zip.pth") as source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            content = changes.get(info.filename.partition("/")[2], source.read(info))
            if content is not None:
                copy.writestr(info.filename, content, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"byteorder": b"big"}, "big-endian"),
        ({"data/0": b"\0" * 8}, "has 8 bytes where 432 were declared"),
        ({"data/0": None}, "'zip/data/0' is missing"),
        ({"data.pkl": None}, "without a `data.pkl`"),
        ({"data.pkl": pickle.dumps({})}, "state dict is empty"),
        ({"data.pkl": pickle.dumps({3: 4})}, "not 3"),
        ({"data.pkl": pickle.dumps({"epoch": 4})}, "'epoch' is a int, not a tensor"),
        ({"data.pkl": pickle.dumps(HOLDS_ITSELF)}, "'model' is a dict, not a tensor"),
    ],
)
def test_zip_entries_are_checked(
    changes: dict[str, bytes | None], message: str, tmp_path: Path
) -> None:
    rewrite_zip(tmp_path / "changed.pth", changes)
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path / "changed.pth")


def test_entries_that_would_unpack_to_much_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pth"
    rewrite_zip(path, {"data/0": b"\0" * 10**6}, compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="compressed"):
        read_weights(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("top/data.pkl", b"x" * 1000)
        first = archive.infolist()[0]
        other = zipfile.ZipInfo("top/data/0")
        other.header_offset, other.CRC = first.header_offset, first.CRC
        other.file_size = other.compress_size = first.file_size
        archive.filelist += [other] * 3
    with pytest.raises(UserError, match="declare more bytes than the file has"):
        read_weights(path)


@pytest.mark.parametrize(
    ("offset", "size", "stride", "message"),
    [
        (0, (4, 3), (3, 1), "more elements than its storage"),
        (8, (3,), (1,), "reaches element 10 of a storage of 10"),
        (0, (2, 2), (9, 1), "reaches element 10"),
        (-1, (2,), (1,), "offset, size and stride"),
        (0, (2,), (-1,), "offset, size and stride"),
        (0, (-2,), (1,), "offset, size and stride"),
        (0.0, (2,), (1,), "offset, size and stride"),
        (0, (2, 2), (1,), "size .* and stride"),
        (0, (1,), (2**70,), "stride"),
        (0, (1,) * 40, (1,) * 40, "size"),
        (1, (2, 3), (1, 3), ""),
    ],
)
def test_a_view_stays_inside_its_storage(offset: Any, size: Any, stride: Any, message: str) -> None:
    storage = Storage(FLOAT, 10)
    storage.fill(np.arange(10, dtype=np.float32).tobytes())
    view = TensorView(storage, offset, size, stride)
    if message:
        with pytest.raises(UserError, match=message):
            view.to_array()
    else:
        np.testing.assert_array_equal(view.to_array(), [[1, 4, 7], [2, 5, 8]])


def test_safetensors(tmp_path: Path) -> None:
    arrays = {
        f"module.{dtype}": np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?")
    }
    save_file(arrays, tmp_path / "weights.safetensors")
    actual = read_weights(tmp_path / "weights.safetensors")
    wanted = {name.removeprefix("module."): arrays[name] for name in sorted(arrays)}
    assert_same_state({name: actual[name] for name in sorted(actual)}, wanted)
    bits = (np.float32([1.0, -2.5, 1e30]).view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors_bytes("BF16", [3], bits.tobytes()))
    bfloat16 = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(read_weights(path)["w"], bfloat16)


def safetensors_bytes(dtype: str, shape: list[int], data: bytes) -> bytes:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (safetensors_bytes("F32", [2], b"\0" * 4), "truncated or corrupt"),
        (safetensors_bytes("F32", [2], b"\0" * 8)[:-1], "truncated or corrupt"),
        (safetensors_bytes("F8_E4M3", [2], b"\0" * 2), "dtype F8_E4M3"),
        (b"", "neither a file written by torch.save.*the file is empty.*fetch it again"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "neither a file written by torch.save"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"w\.bin: .*{message}"):
        read_weights(path)


def test_averaged_weights_go_before_the_last_ones_which_can_be_asked_for() -> None:
    """make_t2t_checkpoints.py: they are the averages plus one, under names with "module."."""
    with np.load(FOLDER / "t2t_expected.npz") as arrays:
        averaged = dict(arrays)
    for stem in ("t2t_ema", "t2t_training"):
        assert_same_state(read_weights(FOLDER / f"{stem}.pth"), averaged)
    last = {name: array + 1 for name, array in averaged.items()}
    assert_same_state(read_weights(FOLDER / "t2t_training.pth", averaged=False), last)
    with pytest.raises(UserError, match=r"t2t_ema\.pth.*moving averages only.*'state_dict_ema'"):
        read_weights(FOLDER / "t2t_ema.pth", averaged=False)
    # A file without averages has the same weights either way.
    assert_same_state(read_weights(FOLDER / "training.pth", averaged=False), expected("training"))


def test_what_timm_and_vitae_save_is_read(tmp_path: Path) -> None:
    """A whole training checkpoint as timm's CheckpointSaver writes it, with its command line and
    numbers of NumPy."""
    averages = {"attn.w": np.arange(12, dtype="f4").reshape(3, 4), "seen": np.array(7)}
    last = {name: np.asarray(array + 1) for name, array in averages.items()}
    numbers = [np.float64(75.3), np.float32(2), np.int64(-3), np.bool_(True), np.uint8(200)]
    content = {
        "epoch": 309,
        "state_dict": OrderedDict((f"module.{name}", array) for name, array in last.items()),
        "optimizer": {"state": {0: {"step": 5, "exp_avg": np.ones(3, "f4")}}},
        "args": argparse.Namespace(lr=1e-3, mean=None, opt_betas=[0.9, 0.999], device="cuda:0"),
        "state_dict_ema": OrderedDict(averages),
        "metric": numbers,
        "raw": b"\xff",
    }
    path = save_torch_file(tmp_path / "ViTAE-T.pth.tar", content)
    assert_same_state(read_weights(path), averages)
    assert_same_state(read_weights(path, averaged=False), last)
    found = torch_files.read_torch_file(path)
    assert (found["metric"], found["raw"]) == ([75.3, 2.0, -3, True, 200], b"\xff")
    for number, message in (
        (np.float64(3), "'w' is a float, not a tensor"),
        (np.complex64(3), "numpy number of type 'c8'"),
    ):
        save_torch_file(path, {"w": number})
        with pytest.raises(UserError, match=message):
            read_weights(path)


class _RunsCode:
    """As the code in a hostile file: unpickled by the stock unpickler it would make a file."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, ("touch code-from-the-checkpoint-ran",)


@pytest.mark.parametrize("inside", [_RunsCode(), argparse.Namespace(model=_RunsCode())])
def test_code_beside_the_weights_is_not_run(
    inside: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"state_dict_ema": {"w": np.ones(3, "f4")}, "args": inside}
    path = save_torch_file(tmp_path / "hostile.pth.tar", content)
    with pytest.raises(UserError, match=r"hostile\.pth\.tar.*wants to run `posix\.system`"):
        read_weights(path)
    assert [file.name for file in tmp_path.iterdir()] == ["hostile.pth.tar"]


def test_bfloat16_is_rounded_to_the_nearest():
    """Ties to even; against the two neighbours in float64."""
    random = np.random.default_rng(0)
    values = (random.standard_normal(1000) * 10.0 ** random.integers(-30, 30, 1000)).astype("f4")

    def rounded(values: np.ndarray) -> np.ndarray:
        return torch_files.widen_bfloat16(torch_files.narrow_to_bfloat16(values))

    below = values.view(np.uint32) & 0xFFFF0000
    candidates = (rounded(values), below.view("f4"), (below + 0x10000).view("f4"))
    distances = [np.abs(each.astype(np.float64) - values) for each in candidates]
    np.testing.assert_array_equal(distances[0], np.minimum(distances[1], distances[2]))
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38, np.nan], "f4")
    expected = [0.0, -0.0, np.inf, -np.inf, 1.0, 1.015625, np.inf, np.nan]
    np.testing.assert_array_equal(rounded(special), np.float32(expected))
