"""Reads and writes a model in LiBai's checkpoint format: a folder made by `flow.save`.

Checkpoints in the form of all runs here are read too, wherever one of LiBai's may be named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import yaml

from flow_train.checkpoint.folders import (
    checkpoint_folder,
    is_checkpoint,
    newest_checkpoint,
    read_model,
)
from libai_projects.weights.folders import generation_of, read_json, replaced_folder, write_json
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.old_runs import LAST
from libai_projects.weights.oneflow_files import PICKLE, StoredTensor, read_array, read_structure
from libai_projects.weights.table import Config, State, Table, as_float32

MODEL_FOLDER = "model"
_BEST, _FINAL = "model_best", "model_final"
# Files that name a checkpoint beside them.
_POINTERS = ("best", "latest")
# It lies beside the pickle: LiBai's Checkpointer loads every entry of the folder above.
SETTINGS = "libai_config.json"


def detect_mode(path: Path) -> str:
    """ "huggingface" or "libai", by what lies at `path`; a UserError where nothing does."""
    if _resolved(path) is not None:
        return "libai"
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    return "huggingface" if (path / "config.json").is_file() or path.is_file() else "libai"


def find_model(path: Path) -> Path:
    """The checkpoint at a LiBai path: itself, its folder `model`, or of a run's output folder the
    best model by validation, else the newest. Raises UserError where there is none."""
    if _resolved(path) is not None:
        return path
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    inside = checkpoint_folder(path) if checkpoint_folder(path).is_dir() else path
    for pointer in ("best", "latest"):
        found = _resolved(inside / pointer)
        if found is not None:
            return found
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
        f"--model {path} holds no model: give a checkpoint, such as .../checkpoints/step-00001000, "
        "the output folder of a training that has saved one, or a Hugging Face directory"
    )


def _resolved(path: Path) -> Path | None:
    """The checkpoint in the form of all runs here that a path names: its folder; `model` in it,
    which other forms have; or what the files `best` and `latest` point to."""
    if path.name in _POINTERS and path.is_file():
        path = path.with_name(path.read_text().strip())
    if path.name == MODEL_FOLDER and not path.exists():
        path = path.parent
    return path if is_checkpoint(path) else None


def is_libai(path: Path) -> bool:
    """Whether a path names a checkpoint of a run here, or of LiBai."""
    return _resolved(path) is not None or _holds_model(path)


def _holds_model(folder: Path) -> bool:
    return (folder / PICKLE).is_file() or (folder / MODEL_FOLDER / PICKLE).is_file()


def model_folder(path: Path) -> Path:
    """The checkpoint's folder, or of older forms that of `flow.save`, `path` or its `model`; a
    UserError says what else the path is."""
    found = _resolved(path)
    if found is not None:
        return found
    for folder in (path, path / MODEL_FOLDER):
        if (folder / PICKLE).is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a checkpoint, such as .../model")
    hint = "expected the `model` folder of a checkpoint"
    newest = newest_checkpoint(path)
    if newest is not None:
        hint = f"it is the output folder of a run; its newest checkpoint is {newest}"
    elif (path / LAST).is_file():
        name = (path / LAST).read_text(errors="replace").strip()
        hint = f"it is the output folder of a run; its newest checkpoint is {path / name}"
    elif (path / "config.json").is_file():
        hint = "it is a Hugging Face model"
    raise UserError(f"{path} has no {PICKLE}, so it is not a LiBai checkpoint; {hint}")


def read_state(path: Path) -> State:
    """The state dict of a checkpoint or its `model` folder, floating-point numbers in float32. A
    UserError where it is damaged, needs code to be run, or holds something else."""
    folder = model_folder(path)
    try:
        if is_checkpoint(folder):
            return {name: as_float32(array) for name, array in read_model(folder).items()}
        data = read_structure(folder)
        if not isinstance(data, dict) or not data:
            raise UserError(f"{PICKLE} holds a {type(data).__name__}, not a state dict")
        for name, value in data.items():
            if not isinstance(name, str) or not isinstance(value, StoredTensor):
                raise UserError(
                    f"the entry {name!r} is a {type(value).__name__}, not a tensor; expected the "
                    "checkpoint's `model`, not its optimizer or schedule"
                )
        return {name: as_float32(read_array(folder, value)) for name, value in data.items()}
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
