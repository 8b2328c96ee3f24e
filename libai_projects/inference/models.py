"""The weights that a path names (a Hugging Face folder, a checkpoint, a run's output), or random
ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.training.checkpoint_folders import LAST

import numpy as np

from libai_projects.weights.mapping import State, expected_shapes

# The files of `flow.save`, and the folder of a checkpoint that holds the model's.
_PICKLE, _MODEL = "pickled_data", "model"
_BEST, _FINAL = "model_best", "model_final"


def detect_mode(path: Path) -> str:
    """ "huggingface" or "libai", by what lies at `path`.

    Raises:
        UserError: nothing does.
    """
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    return "huggingface" if (path / "config.json").is_file() or path.is_file() else "libai"


def find_model(path: Path) -> Path:
    """The checkpoint that a LiBai path means.

    Args:
        path: a checkpoint, its folder `model`, or a run's output folder: then its best model by
            validation, else its newest.

    Raises:
        UserError: there is none.
    """
    if not path.exists():
        raise UserError(f"--model {path}: there is nothing of that name")
    for folder in (path, path / _BEST):
        if _holds_model(folder):
            return folder
    tag = path / LAST
    last = path / tag.read_text(encoding="utf-8").strip() if tag.is_file() else path
    # The final one is older where a run was continued and has not ended again.
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
    return (folder / _PICKLE).is_file() or (folder / _MODEL / _PICKLE).is_file()


def random_weights(config: Mapping[str, Any], seed: int) -> State:
    """Weights as GPT-2's training begins with them (libai_spec 3.1), the same in every layout.

    Normal with `initializer_range`, those that end a block divided by sqrt(2 x layers); factors
    of Monarch layers as those begin; biases 0, norms 1.

    Args:
        config: `cfg.model.cfg`.
        seed: of NumPy's generator.

    Returns:
        LiBai 0.1.1's names; float32.
    """
    generator = np.random.default_rng(seed)
    state: State = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith(".bias"):
            state[name] = np.zeros(shape, np.float32)
        elif "layernorm" in name:
            state[name] = np.ones(shape, np.float32)
        elif ".blkdiag" in name:
            bound = np.float32(1 / math.sqrt(shape[-1]))
            state[name] = bound * (2 * generator.random(shape, np.float32) - 1)
        else:
            std = config.get("initializer_range", 0.02)
            if name.endswith((".self_attention.dense.weight", ".mlp.dense_4h_to_h.weight")):
                std /= math.sqrt(2 * config["num_layers"])
            state[name] = generator.standard_normal(shape, np.float32) * np.float32(std)
    return state
