"""Weights into and out of an OneFlow model in any parallel layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import oneflow_accel  # noqa: F401
from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from libai_projects.weights import huggingface, mapping
from libai_projects.weights.mapping import Report, State


def load_into(
    model: nn.Module,
    state: Mapping[str, np.ndarray],
    report: Report | None = None,
    *,
    partial: bool = False,
    vocab_size: int | None = None,
) -> Report:
    """Copy weights into a model's parameters, whatever their placement and sbp.

    Every process of a job has to call this; rank 0's state counts, the others may be empty. The
    vocabulary is padded with zeros to the model's rows, or cut to them.

    Args:
        model: local or global; names with or without the prefix `GPT_model.`.
        state: LiBai 0.1.1's names and layout, from `load`.
        report: filled in with the differences, if given.
        partial: leave parameters that are missing or do not fit as they are.
        vocab_size: how many rows of the state are tokens; the model may have as few. None: all.

    Returns:
        The differences, the same on every process.

    Raises:
        UserError: there are differences, and not `partial`; counts them. No parameter has changed.
    """
    targets = dict(model.named_parameters())
    prefix = "" if any(name.startswith(mapping.PREFIX) for name in targets) else mapping.PREFIX
    wanted = {prefix + name: tuple(target.shape) for name, target in targets.items()}
    if distributed.is_main():
        state = _with_rows(state, wanted, vocab_size)
        found = mapping.compare(mapping.shapes_of(state), wanted)
        fitting = list(mapping.keep_fitting(dict(state), wanted))
        told = [[found.missing, found.unexpected, found.mis_shaped], fitting]
    else:
        told = [[], []]
    differences, fitting = distributed.all_gather_json(_plain(told))[0]
    result = report if report is not None else Report()
    result.missing, result.unexpected = differences[:2]
    result.mis_shaped = [(name, tuple(a), tuple(b)) for name, a, b in differences[2]]
    if result and not partial:
        raise UserError(
            f"the set of weights does not fit the model: {result.brief()}; was it made for a "
            "model of other sizes?"
        )
    with flow.no_grad():
        for name in fitting:
            _assign(targets[name.removeprefix(prefix)], state.get(name))
    return result


def gather_state(model: nn.Module) -> State:
    """All parameters of a model on rank 0, under LiBai's names; empty on the other processes.

    Every process of a job has to call this.
    """
    state = {}
    for name, tensor in model.named_parameters():
        array = _on_main(tensor)
        if array is not None:
            state[mapping.PREFIX + name.removeprefix(mapping.PREFIX)] = array
    return state


def save_huggingface(
    model_or_state: nn.Module | Mapping[str, np.ndarray],
    cfg: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    generation: Mapping[str, int] | None = None,
    tokenizer_files: Iterable[str | os.PathLike[str]] = (),
    force: bool = False,
) -> None:
    """Write a folder that `transformers` loads. Every process of a job has to call this.

    Args:
        model_or_state: a model in any layout, or a state dict in LiBai 0.1.1's layout (rank 0's
            counts).
        cfg: LiBai's model settings (`cfg.model.cfg`); rows of the vocabulary above
            `vocab_size_real`, where that is set, are left out.
        folder, dtype, generation, tokenizer_files, force: see `huggingface.write`.

    Raises:
        UserError: it could not be written; the same on every process.
    """
    if isinstance(model_or_state, nn.Module):
        state: Mapping[str, np.ndarray] = gather_state(model_or_state)
    else:
        state = model_or_state
    failure = None
    if distributed.is_main():
        try:
            huggingface.write(
                _without_padding(state, cfg),
                dict(cfg),
                Path(folder),
                dtype=dtype,
                generation=generation,
                tokenizer_files=[Path(file) for file in tokenizer_files],
                force=force,
            )
        except UserError as error:
            failure = str(error)
    failure = distributed.all_gather_json(failure)[0]
    if failure is not None:
        raise UserError(failure)


def _without_padding(state: Mapping[str, np.ndarray], cfg: Mapping[str, Any]) -> State:
    real = dict(cfg).get("vocab_size_real")
    result = {name: np.asarray(array, np.float32) for name, array in state.items()}
    wanted = mapping.expected_shapes({**dict(cfg), "vocab_size": len(result[_tokens(result)])})
    report = mapping.compare(mapping.shapes_of(result), wanted)
    report.require_none("the set of weights", "does the configuration belong to it?")
    if real is not None:
        result[mapping.TOKEN_EMBEDDING] = result[mapping.TOKEN_EMBEDDING][: int(real)]
    return result


def _tokens(state: Mapping[str, np.ndarray]) -> str:
    if mapping.TOKEN_EMBEDDING not in state:
        raise UserError(f"the set of weights has no {mapping.TOKEN_EMBEDDING}")
    return mapping.TOKEN_EMBEDDING


def _with_rows(
    state: Mapping[str, np.ndarray], wanted: mapping.Shapes, vocab_size: int | None
) -> State:
    """The state with the model's number of vocabulary rows, unless tokens would be lost."""
    result = dict(state)
    tokens, shape = result.get(mapping.TOKEN_EMBEDDING), wanted.get(mapping.TOKEN_EMBEDDING)
    if tokens is not None and shape is not None:
        needed = len(tokens) if vocab_size is None else vocab_size
        if shape[0] >= needed:
            result[mapping.TOKEN_EMBEDDING] = mapping.resize_vocabulary(tokens[:needed], shape[0])
    return result


def _assign(target: flow.Tensor, array: np.ndarray | None) -> None:
    """Give a parameter rank 0's array, one parameter at a time so that memory stays small."""
    if not distributed.is_main() or array is None:
        array = np.empty(tuple(target.shape), np.float32)
    value = flow.tensor(np.ascontiguousarray(array, np.float32))
    if distributed.world_size() > 1:
        flow.comm.broadcast(value, 0)
    value = value.to(target.dtype)
    if target.is_global:
        whole = [flow.sbp.broadcast] * len(target.sbp)
        value = value.to_global(placement=target.placement, sbp=whole).to_global(sbp=target.sbp)
    target.copy_(value)


def _on_main(tensor: flow.Tensor) -> np.ndarray | None:
    """The whole value on rank 0, None elsewhere; a local tensor is rank 0's own."""
    if tensor.is_global:
        first = flow.placement(tensor.placement.type, [0])
        tensor = tensor.detach().to_global(sbp=[flow.sbp.broadcast] * len(tensor.sbp))
        tensor = tensor.to_global(placement=first, sbp=flow.sbp.broadcast).to_local()
    return tensor.detach().float().numpy() if distributed.is_main() else None


def _plain(value: Any) -> Any:
    """Tuples as lists, for JSON."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
