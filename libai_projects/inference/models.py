"""The weights that a path names: a Hugging Face folder, a checkpoint, a run's output."""

from __future__ import annotations

from pathlib import Path

from oneflow_accel.errors import UserError

from flow_train.checkpoint.libai_folders import LAST

# The files of `flow.save`, and the folder of a checkpoint that holds the model's.
_PICKLE, _MODEL = "pickled_data", "model"
_BEST, _FINAL = "model_best", "model_final"


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
    return (folder / _PICKLE).is_file() or (folder / _MODEL / _PICKLE).is_file()
