"""Reads and writes the folder that `transformers` loads a GPT-2 from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import safetensors

from flow_train.checkpoint.weights import read_weights
from flow_train.files import write_synced
from libai_projects.weights import configs, mapping
from libai_projects.weights.densify import densified
from libai_projects.weights.folders import replaced_folder
from libai_projects.weights.mapping import State

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
# In the order in which transformers prefers them; an index lists the files of sharded weights.
_WEIGHT_FILES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
DTYPES = ("float32", "float16", "bfloat16")


def read_config(folder: Path) -> configs.Config:
    """LiBai's model settings from the folder's config.json.

    Raises:
        UserError: the folder is no Hugging Face model, or of another architecture.
    """
    _check_folder(folder)
    return configs.from_huggingface(configs.read_json(folder / CONFIG), folder / CONFIG)


def read_generation(folder: Path) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the folder says.

    Raises:
        UserError: a file cannot be read.
    """
    files = [folder / GENERATION_CONFIG, folder / CONFIG]
    return configs.generation_of(*(configs.read_json(file) for file in files if file.exists()))


def read_state(folder: Path) -> State:
    """The weights under Hugging Face's names without `transformer.`, float32.

    Raises:
        UserError: there are none, or a file is missing, truncated or corrupt.
    """
    _check_folder(folder)
    for name in _WEIGHT_FILES:
        path = folder / name
        if path.exists():
            state = _read_sharded(path) if name.endswith(".index.json") else read_weights(path)
            return mapping.clean_huggingface(
                {name: mapping.as_float32(array) for name, array in state.items()}
            )
    raise UserError(f"{folder} has a {CONFIG} but no weights; expected {_listed(_WEIGHT_FILES)}")


def write(
    state: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    folder: Path,
    *,
    dtype: str = "float32",
    generation: Mapping[str, int] | None = None,
    tokenizer_files: Iterable[Path] = (),
    force: bool = False,
) -> None:
    """Write the folder: config.json, generation_config.json, model.safetensors, tokenizer files.

    Args:
        state: weights in LiBai 0.1.1's layout, with the rows of the real vocabulary; Monarch
            layers are multiplied out.
        config: LiBai's model settings.
        folder: whole or as before, whatever happens.
        dtype: of the weights, one of DTYPES.
        generation: token ids for generation_config.json.
        tokenizer_files: copied; tokenizer.json or vocab.json and merges.txt, as transformers names
            them.
        force: replace a folder of weights.

    Raises:
        UserError: a setting is missing, or the folder may not be written.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}; expected one of {_listed(DTYPES)}")
    rows = state[mapping.TOKEN_EMBEDDING].shape[0]
    content = configs.to_huggingface({**config, "vocab_size": rows}, dtype)
    content.update(generation or {})
    named = mapping.to_huggingface(densified(state, config), config["num_attention_heads"])
    files = list(tokenizer_files)
    for file in files:
        if not file.is_file():
            raise UserError(f"tokenizer file {file} is missing")
    with replaced_folder(folder, force=force) as temporary:
        write_synced(temporary / WEIGHTS, _serialized(named, dtype))
        _write_json(temporary / CONFIG, dict(sorted(content.items())))
        _write_json(temporary / GENERATION_CONFIG, dict(generation or {}))
        for file in files:
            shutil.copyfile(file, temporary / file.name)


def _serialized(state: Mapping[str, np.ndarray], dtype: str) -> bytes:
    arrays = {
        name: np.ascontiguousarray(
            _bfloat16_bits(array) if dtype == "bfloat16" else array.astype(dtype, copy=False)
        )
        for name, array in sorted(state.items())
    }
    # transformers refuses a file that does not say which framework's layout it has.
    return bytes(
        safetensors.serialize(
            {
                name: safetensors.TensorSpec(
                    dtype=dtype,
                    shape=array.shape,
                    data_ptr=array.ctypes.data,
                    data_len=array.nbytes,
                )
                for name, array in arrays.items()
            },
            metadata={"format": "pt"},
        )
    )


def _bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """uint16 of the upper half of float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())


def _read_sharded(index: Path) -> State:
    weight_map = configs.read_json(index).get("weight_map")
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


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {found}; expected a folder with {CONFIG} and {WEIGHTS}")
    if (folder / CONFIG).exists():
        return
    libai = (folder / "pickled_data", folder / "model" / "pickled_data")
    hint = "it is a LiBai checkpoint" if any(map(Path.exists, libai)) else "is this the folder?"
    raise UserError(f"{folder} has no {CONFIG}, so it is no Hugging Face model; {hint}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
