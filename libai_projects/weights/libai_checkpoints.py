"""Reads and writes a model in LiBai's checkpoint format: a folder made by `flow.save`.

`pickled_data` is a pickle of {"protocol_version": 1, "data": state dict}, in which a tensor is an
object whose state is {"path": name of a folder beside it}. That folder holds `meta`, a protobuf
text of shape and data type, and `out`, the elements, little endian; see
oneflow/framework/check_point_v2.py. `flow_train.checkpoint.oneflow_files` reads the pickle,
without running code of it; the elements are read here, as here they may also be bfloat16.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import yaml
from google.protobuf import text_format
from oneflow.core.common import data_type_pb2
from oneflow.core.framework import variable_meta_info_pb2

from flow_train.checkpoint.libai_files import LAST
from flow_train.checkpoint.oneflow_files import PICKLE, StoredTensor, read_structure
from flow_train.checkpoint.torch_files import widen_bfloat16
from libai_projects.weights.folders import generation_of, read_json, replaced_folder, write_json
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.table import Config, State, Table, as_float32

MODEL_FOLDER = "model"
_BEST, _FINAL = "model_best", "model_final"
# It lies beside the pickle: LiBai's Checkpointer loads every entry of the folder above.
SETTINGS = "libai_config.json"
_DTYPES = {
    "kFloat": "<f4",
    "kDouble": "<f8",
    "kFloat16": "<f2",
    "kBFloat16": "<u2",
    "kInt8": "i1",
    "kUInt8": "u1",
    "kInt32": "<i4",
    "kInt64": "<i8",
    "kBool": "?",
}


def detect_mode(path: Path) -> str:
    """ "huggingface" or "libai", by what lies at `path`; a UserError where nothing does."""
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    return "huggingface" if (path / "config.json").is_file() or path.is_file() else "libai"


def find_model(path: Path) -> Path:
    """The checkpoint at a LiBai path: itself, its folder `model`, or of a run's output folder the
    best model by validation, else the newest. Raises UserError where there is none."""
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    for folder in (path, path / _BEST):
        if _holds_model(folder):
            return folder
    tag = path / LAST
    last = path / tag.read_text(encoding="utf-8").strip() if tag.is_file() else path
    # The final model is older than the last one where a run was continued and is not finished.
    ends = [folder for folder in (path / _FINAL, last) if _holds_model(folder)]
    if ends:
        return max(ends, key=lambda folder: folder.stat().st_mtime)
    if (path / "config.json").is_file():
        raise UserError(f"--model {path} is a Hugging Face model: use --mode huggingface")
    raise UserError(
        f"--model {path} holds no model: give a checkpoint, such as .../model_0000999, the output "
        "folder of a training that has saved one, or a Hugging Face directory"
    )


def _holds_model(folder: Path) -> bool:
    return (folder / PICKLE).is_file() or (folder / MODEL_FOLDER / PICKLE).is_file()


def model_folder(path: Path) -> Path:
    """The folder of `flow.save`, `path` or its `model`; a UserError says what else the path is."""
    for folder in (path, path / MODEL_FOLDER):
        if (folder / PICKLE).is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a LiBai checkpoint, such as .../model")
    hint = "expected the `model` folder of a checkpoint"
    if (path / LAST).is_file():
        newest = (path / LAST).read_text(errors="replace").strip()
        hint = f"it is the output folder of a run; its newest checkpoint is {path / newest}"
    elif (path / "config.json").is_file():
        hint = "it is a Hugging Face model"
    raise UserError(f"{path} has no {PICKLE}, so it is no LiBai checkpoint; {hint}")


def read_state(path: Path) -> State:
    """The state dict of a checkpoint or its `model` folder, floating-point numbers in float32. A
    UserError where it is damaged, needs code to be run, or holds something else."""
    folder = model_folder(path)
    try:
        data = read_structure(folder)
        if not isinstance(data, dict) or not data:
            raise UserError(f"{PICKLE} holds a {type(data).__name__}, not a state dict")
        places = {name: _tensor_folder(folder, name, value) for name, value in data.items()}
        return {name: as_float32(_read_tensor(place)) for name, place in places.items()}
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"cannot read {folder}: {error}") from error


def read_settings(path: Path, table: Table) -> tuple[Config, dict[str, int]]:
    """Model settings and token ids beside a checkpoint, if any: of libai_config.json, else of the
    config.yaml of the run that wrote it. A UserError where a file cannot be parsed."""
    folder = model_folder(path)
    if (folder / SETTINGS).exists():
        content = read_json(folder / SETTINGS)
        model, generation = content.get("model"), content.get("generation", {})
        if not isinstance(model, dict) or not isinstance(generation, dict):
            raise UserError(f"{folder / SETTINGS} has no settings under 'model' and 'generation'")
        return table.known_settings(model), generation_of(generation)
    for parent in list(folder.absolute().parents)[:2]:
        if (parent / "config.yaml").is_file():
            return _from_yaml(parent / "config.yaml", table), {}
    return {}, {}


def save_libai(
    state: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    folder: str | Path,
    table: Table = GPT2,
    *,
    generation: Mapping[str, int] | None = None,
    vocabulary_rows: int | None = None,
    dtype: str = "float32",
    force: bool = False,
) -> None:
    """Write FOLDER/model as LiBai 0.1.1's Checkpointer would, or nothing, with a libai_config.json.

    `state` is in LiBai 0.1.1's layout; `vocabulary_rows` pads the token embedding; `dtype` is
    "float32" or "float16"; `force` replaces a folder of weights. Raises UserError.
    """
    if dtype not in ("float32", "float16"):
        raise UserError(f"a LiBai checkpoint can be written in float32 or float16, not in {dtype}")
    real = len(state[table.tokens])
    rows = vocabulary_rows or real
    tensors = OrderedDict()
    for name, array in table.resized(state, rows).items():
        tensors[name] = flow.tensor(array.astype(dtype, copy=False))
    settings = {
        "model": {**config, "vocab_size": rows, "vocab_size_real": real},
        "generation": dict(generation or {}),
    }
    with replaced_folder(Path(folder), force=force) as temporary:
        flow.save(tensors, temporary / MODEL_FOLDER)
        write_json(temporary / MODEL_FOLDER / SETTINGS, settings)


def _from_yaml(path: Path, table: Table) -> Config:
    """The model's settings in a run's config.yaml, of which nothing is constructed.

    A run that trained with LiBai's fused bias_gelu, or with its own GPT model, used the erf form of
    GELU; else `activation` counts. A UserError where the file cannot be parsed.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("cfg"), dict):
        return {}
    settings = dict(model["cfg"])
    if "hidden_layers" in settings:
        settings.setdefault("num_layers", settings["hidden_layers"])
    own_gpt = str(model.get("_target_", "")).startswith("libai.models")
    if "activation" not in settings and (settings.get("bias_gelu_fusion") or own_gpt):
        settings["activation"] = "gelu"
    return table.known_settings(settings)


class _PlainLoader(yaml.SafeLoader):
    """Reads unknown tags as None instead of refusing the file."""


_PlainLoader.add_multi_constructor("", lambda _loader, _suffix, _node: None)


def _tensor_folder(folder: Path, name: Any, value: Any) -> Path:
    if not isinstance(name, str) or not isinstance(value, StoredTensor):
        raise UserError(
            f"the entry {name!r} is a {type(value).__name__}, not a tensor; expected the "
            "checkpoint's `model`, not its optimizer or schedule"
        )
    place = value.name
    if not isinstance(place, str) or not place or Path(place).name != place:
        raise UserError(f"the tensor {name!r} lies in {place!r}; expected the name of a folder")
    return folder / place


def _read_tensor(folder: Path) -> np.ndarray:
    meta = variable_meta_info_pb2.VariableMetaInfo()
    try:
        text_format.Parse((folder / "meta").read_text(encoding="utf-8"), meta)
        type_name = data_type_pb2.DataType.Name(meta.data_type)
    except OSError as error:
        raise UserError(f"{folder.name}/meta: {error.strerror or error}") from error
    except (text_format.ParseError, ValueError) as error:
        raise UserError(f"{folder.name}/meta is corrupt ({error})") from error
    if type_name not in _DTYPES:
        raise UserError(f"{folder.name} holds elements of type {type_name}, which is not supported")
    shape = tuple(meta.shape.dim)
    dtype = np.dtype(_DTYPES[type_name])
    data = (folder / "out").read_bytes()
    if min(shape, default=1) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{folder.name}/out has {len(data)} bytes where {shape} of {type_name} needs "
            f"{math.prod(shape) * dtype.itemsize}: truncated or corrupt"
        )
    flat = np.frombuffer(data, dtype)
    return (widen_bfloat16(flat) if type_name == "kBFloat16" else flat).reshape(shape)
