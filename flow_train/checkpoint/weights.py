"""Reads a model's weights from the files that other projects publish: .pth, .pt and .safetensors.

The format is told from the first bytes, not from the name: `.pth.tar` is not a tar file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import safetensors

from flow_train.checkpoint import torch_files

logger = logging.getLogger("oneflow_accel")

# The entry where timm puts the moving averages, which are what it validates.
_AVERAGED_KEY = "state_dict_ema"
_WRAPPING_KEYS = ("state_dict", "model", "module")
_MOST_WRAPPINGS = 8
_PARALLEL_PREFIX = "module."
_SAFETENSORS_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def read_weights(path: str | os.PathLike[str], *, averaged: bool = True) -> dict[str, np.ndarray]:
    """Read the state dict in a checkpoint file, running no code that the file may hold: name to
    contiguous array in the file's dtype; bfloat16 becomes float32. The file is one of `torch.save`
    (zip or legacy format) or of safetensors.

    A training checkpoint is unwrapped, however often: its entry "state_dict_ema" (moving averages,
    which timm validates; only if `averaged`), "state_dict", "model" or "module" is taken. The
    prefix "module." that data-parallel wrappers add is removed.

    UserError names the file if it is missing, of another format, truncated or corrupt, if it needs
    code to be run, or holds something else than tensors, or only averages that are not wanted.
    """
    path = Path(path)
    try:
        return _read(path, averaged)
    except OSError as error:
        raise UserError(f"cannot read weights from {path}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"cannot read weights from {path}: {error}") from error


def bfloat16_names(path: str | os.PathLike[str], *, averaged: bool = True) -> frozenset[str]:
    """The arrays of `read_weights` that are bfloat16 in the file; the same errors."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(32)
        if head[8:9] == b"{" and not head.startswith(torch_files.ZIP_SIGNATURE):
            entries = safetensors.deserialize(path.read_bytes())
            found = {name: entry["dtype"] == "BF16" for name, entry in entries}
        else:
            state = _without_parallel_prefix(_unwrap(torch_files.read_torch_file(path), averaged))
            found = {
                name: isinstance(value, torch_files.TensorView) and value.storage.type.is_bfloat16
                for name, value in state.items()
            }
    except (OSError, UserError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot read weights from {path}: {error}") from error
    return frozenset(name for name, is_bfloat16 in found.items() if is_bfloat16)


def _read(path: Path, averaged: bool) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        head = file.read(32)
    if head.startswith((torch_files.ZIP_SIGNATURE, torch_files.LEGACY_SIGNATURE)):
        content = torch_files.read_torch_file(path)
    # A safetensors file is the length of its JSON header in 8 bytes, then the header.
    elif head[8:9] == b"{":
        content = _read_safetensors(path)
    else:
        content = "the file is empty" if not head else f"the file begins with {head[:12]!r}"
        raise UserError(
            "neither a file written by torch.save (.pth, .pt, .pth.tar) nor a .safetensors file: "
            f"{content}; if it was downloaded, fetch it again"
        )
    return arrays_of(content, averaged=averaged)


def arrays_of(content: Any, *, averaged: bool = True) -> dict[str, np.ndarray]:
    """The state dict, in the file's order, in what `torch_files.read_torch_file` returned: itself
    or a training checkpoint around it. Errors are those of `read_weights`, without the file's
    name."""
    state = _without_parallel_prefix(_unwrap(content, averaged))
    return {name: _to_array(name, value) for name, value in state.items()}


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise UserError(f"truncated or corrupt ({error}); fetch it again") from error
    state = {}
    for name, entry in entries:
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype == "BF16":
            flat = torch_files.widen_bfloat16(np.frombuffer(entry["data"], "<u2"))
        elif dtype in _SAFETENSORS_DTYPES:
            flat = np.frombuffer(entry["data"], _SAFETENSORS_DTYPES[dtype])
        else:
            raise UserError(f"{name!r} has dtype {dtype}, which is not supported")
        state[name] = flat.reshape(shape)
    return state


def _unwrap(content: Any, averaged: bool) -> Mapping[str, Any]:
    keys = (_AVERAGED_KEY, *_WRAPPING_KEYS) if averaged else _WRAPPING_KEYS
    # A number of times, as a pickle can hold a dict that holds itself.
    for _ in range(_MOST_WRAPPINGS):
        if not isinstance(content, Mapping):
            break
        inner = next((k for k in keys if isinstance(content.get(k), Mapping)), None)
        if inner is None:
            break
        if inner == _AVERAGED_KEY and any(k in content for k in _WRAPPING_KEYS):
            logger.info("of the weights in the file, their moving averages are taken")
        content = content[inner]
    if not isinstance(content, Mapping):
        raise UserError(f"it holds a {type(content).__name__}, not a state dict")
    if not averaged and isinstance(content.get(_AVERAGED_KEY), Mapping):
        raise UserError(
            f"it has moving averages only ({_AVERAGED_KEY!r}), and the last step's weights are "
            "asked for"
        )
    if not content:
        raise UserError("its state dict is empty")
    return content


def _without_parallel_prefix(state: Mapping[Any, Any]) -> dict[str, Any]:
    names = [name for name in state if not isinstance(name, str)]
    if names:
        raise UserError(f"a state dict's keys are parameter names, not {names[0]!r}")
    while all(name.startswith(_PARALLEL_PREFIX) for name in state):
        state = {name.removeprefix(_PARALLEL_PREFIX): value for name, value in state.items()}
    return dict(state)


def _to_array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, torch_files.TensorView):
        return value.to_array()
    if isinstance(value, np.ndarray):
        return value
    raise UserError(
        f"the entry {name!r} is a {type(value).__name__}, not a tensor; expected a state dict, "
        f"alone or under one of the keys {', '.join(map(repr, (_AVERAGED_KEY, *_WRAPPING_KEYS)))}"
    )
