"""Reads and writes the folder that `transformers` loads a model from."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import safetensors

from flow_train.checkpoint.torch_files import narrow_to_bfloat16
from flow_train.checkpoint.weights import read_weights
from flow_train.files import write_synced
from libai_projects.weights import int8
from libai_projects.weights.folders import generation_of, read_json, replaced_folder, write_json
from libai_projects.weights.table import Config, State, Table, as_float32

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# In the order in which transformers prefers them; an index lists the files of sharded weights.
_WEIGHT_FILES = (
    WEIGHTS,
    INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
DTYPES = ("float32", "float16", "bfloat16", "int8")
# config.json's, without which transformers would take the integers for weights.
_INT8 = {"quantization_config": {"quant_method": "int8_per_output"}}


def read(folder: Path, table: Table) -> tuple[State, Config, dict[str, int]]:
    """A folder's weights under Hugging Face's names without the prefix, float32; LiBai's settings;
    token ids for generation. A UserError for a damaged folder or another architecture."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {found}; expected a folder with {CONFIG} and {WEIGHTS}")
    if not (folder / CONFIG).exists():
        libai = (folder / "pickled_data", folder / "model" / "pickled_data")
        hint = "it is a LiBai checkpoint" if any(map(Path.exists, libai)) else "is this the folder?"
        raise UserError(f"{folder} has no {CONFIG}, so it is no Hugging Face model; {hint}")
    content = read_json(folder / CONFIG)
    config = table.read_config(content, folder / CONFIG)
    path = next((folder / name for name in _WEIGHT_FILES if (folder / name).exists()), None)
    if path is None:
        raise UserError(
            f"{folder} has a {CONFIG} but no weights; expected {', '.join(_WEIGHT_FILES)}"
        )
    state = _read_sharded(path) if path.name.endswith(".index.json") else read_weights(path)
    state = int8.widened(state, table, path)
    state = table.clean_huggingface(
        {name: as_float32(array) for name, array in state.items()}, config
    )
    ids = folder / GENERATION_CONFIG
    return state, config, generation_of(*([read_json(ids)] if ids.exists() else []), content)


def write(
    state: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    folder: Path,
    table: Table,
    *,
    dtype: str = "float32",
    generation: Mapping[str, int] | None = None,
    tokenizer_files: Iterable[Path] = (),
    force: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json, generation_config.json, model.safetensors and tokenizer files, or nothing.
    Above `max_shard_bytes` the weights are several files, with an index.

    `state` is in LiBai 0.1.1's layout, with the rows of the real vocabulary; Monarch layers are
    multiplied out. `dtype` "int8" is of linear weights, the others are float32; see `int8`.
    `tokenizer_files` are copied: tokenizer.json, or vocab.json and merges.txt.
    `force` replaces a folder of weights. Raises UserError for a missing setting or a folder in use.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    rows = state[table.tokens].shape[0]
    # That of the weights which are not integers.
    floats = "float32" if dtype == "int8" else dtype
    content = table.written_config({**config, "vocab_size": rows}, floats)
    named = table.to_huggingface(table.densified(state, config), config["num_attention_heads"])
    if dtype == "int8":
        content |= _INT8
        named = int8.stored(named, table)
    files = list(tokenizer_files)
    for file in files:
        if not file.is_file():
            raise UserError(f"tokenizer file {file} is missing")
    with replaced_folder(folder, force=force) as temporary:
        _write_weights(temporary, named, floats, max_shard_bytes)
        write_json(temporary / CONFIG, {**content, **(generation or {})})
        write_json(temporary / GENERATION_CONFIG, generation or {})
        for file in files:
            shutil.copyfile(file, temporary / file.name)


def _write_weights(folder: Path, state: State, dtype: str, most: int) -> None:
    sizes = {
        name: array.size * (1 if array.dtype == np.int8 else 4 if dtype == "float32" else 2)
        for name, array in state.items()
    }
    shards: list[State] = [{}]
    filled = 0
    for name, array in sorted(state.items()):
        if shards[-1] and filled + sizes[name] > most:
            shards.append({})
            filled = 0
        shards[-1][name] = array
        filled += sizes[name]
    if len(shards) == 1:
        write_synced(folder / WEIGHTS, _serialized(state, dtype))
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_synced(folder / name, _serialized(shard, dtype))
        places.update(dict.fromkeys(shard, name))
    total = {"total_size": sum(sizes.values())}
    write_json(folder / INDEX, {"metadata": total, "weight_map": places})


def _serialized(state: Mapping[str, np.ndarray], dtype: str) -> bytes:
    specs, arrays = {}, []
    for name, array in sorted(state.items()):
        kind = "int8" if array.dtype == np.int8 else dtype
        values = narrow_to_bfloat16(array) if kind == "bfloat16" else array.astype(kind, copy=False)
        # The specification holds only an address, so the array must stay alive.
        arrays.append(values := np.ascontiguousarray(values))
        specs[name] = safetensors.TensorSpec(
            dtype=kind, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes
        )
    # transformers refuses a file that does not say which framework's layout it has.
    return bytes(safetensors.serialize(specs, metadata={"format": "pt"}))


def _read_sharded(index: Path) -> State:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map that names the files of the weights")
    state: State = {}
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name:
            raise UserError(f"{index} names {name!r}; the files must lie beside it")
        shard = index.parent / name
        if not shard.exists():
            raise UserError(f"{shard} is missing; {index.name} lists it")
        tensors = read_weights(shard)
        absent = [key for key, file in weight_map.items() if file == name and key not in tensors]
        if absent:
            raise UserError(f"{shard} lacks {absent[0]!r}, which {index.name} puts there")
        state.update(tensors)
    return state
