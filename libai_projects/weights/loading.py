"""Weights of any of the three kinds into LiBai 0.1.1's layout, and from there into and out of an
OneFlow model in any parallel layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0, whole
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.checkpoint.folders import Checkpoint
from libai_projects.weights import huggingface, libai_checkpoints
from libai_projects.weights.bert import BERT
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.llama import LLAMA, read_meta
from libai_projects.weights.table import (
    Config,
    MisfitError,
    Report,
    State,
    Table,
    check_heads,
    compare,
    resize_vocabulary,
)

MODES = ("huggingface", "libai", "upstream", "meta")
TABLES = {table.model_type: table for table in (GPT2, LLAMA, BERT)}
"""By config.json's model_type."""
_PARTIAL_HINT = "is it the right model? --partial takes what fits"
# Most rows that padding adds: a multiple such as 128 for each of 8 tensor-parallel processes.
_MOST_PADDING = 1024


@dataclass
class Loaded:
    """Weights in LiBai 0.1.1's layout, float32, with the rows of the real vocabulary, and the keys
    of `cfg.model.cfg` and token ids that are known; `report` is what `partial` left out.

    A LiBai checkpoint without its config.yaml does not tell `num_attention_heads`.
    """

    state: State
    config: Config
    generation: dict[str, int] = field(default_factory=dict)
    report: Report = field(default_factory=Report)


def load(
    path: str | os.PathLike[str],
    mode: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    table: Table = GPT2,
) -> tuple[State, Config]:
    """Read a model's weights and settings, as `Loaded` has them; every process of a job calls this.

    Rank 0 reads; the others get an empty state, which `load_into` accepts, and the same settings or
    UserError, which counts missing, unexpected and mis-shaped names.

    Args:
        path: a folder with config.json and weights, or params.json and Meta's; or a checkpoint or
            its `model` folder.
        mode: one of MODES.
        overrides: settings that the files do not tell or tell wrongly.
    """
    state: State = {}

    def action() -> Config:
        nonlocal state
        try:
            loaded = read(path, mode, overrides=overrides, table=table)
        except MisfitError as error:
            # One line is enough here: the converter lists every name, and can leave some out.
            raise UserError(f"{error.brief}; is it the right model?") from error
        state = loaded.state
        return loaded.config

    config = on_rank_0(action)
    return state, config


def read(
    path: str | os.PathLike[str],
    mode: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    partial: bool = False,
    table: Table = GPT2,
) -> Loaded:
    """What `load` does, in this process alone, and all that was found. `partial` leaves out what is
    missing or does not fit."""
    if mode not in MODES:
        raise UserError(f"weights of kind {mode!r}; expected one of {', '.join(MODES)}")
    unknown = sorted(set(overrides or {}) - table.keys)
    if unknown:
        raise UserError(f"unknown model settings: {', '.join(unknown)}")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    source = Path(path)
    theirs = mode in ("huggingface", "meta")
    if theirs:
        if mode == "huggingface":
            state, config, generation = huggingface.read(source, table)
        elif table is LLAMA:
            state, config, generation = *read_meta(source), {}
        else:
            raise UserError(f"weights of kind 'meta' are a Llama's, not of {table.title}")
        config = {**config, **given}
        check_heads(config, source)
        # The report has the file's own names.
        wanted = table.their_shapes(config)
    else:
        state, config, generation = _read_libai(source, given, table, upstream=mode == "upstream")
        wanted = table.shapes(config)
    report, state = compare(state, wanted)
    if report and not partial:
        raise MisfitError(report, str(path), _PARTIAL_HINT)
    if theirs:
        state = table.from_huggingface(state, config["num_attention_heads"])
    rows, real = config["vocab_size"], config["vocab_size_real"]
    if real > rows:
        raise UserError(f"{path} has {rows} rows of vocabulary, fewer than {real} tokens")
    state = table.resized(state, real)
    return Loaded(state, {**config, "vocab_size": real}, generation, report)


def _read_libai(
    path: Path, given: Config, table: Table, *, upstream: bool
) -> tuple[State, Config, dict[str, int]]:
    state = table.clean_libai(libai_checkpoints.read_state(path))
    try:
        if table.linear_is_out_in(state, default=upstream):
            state = table.transposed(state)
        known, generation = libai_checkpoints.read_settings(path, table)
        # Sizes are those of the tensors: a settings file may be another run's.
        config = {"activation": table.activation, **known, **table.sizes_of(state, known), **given}
    except UserError as error:
        raise UserError(f"cannot use {path}: {error}") from error
    rows, real = config["vocab_size"], given.get("vocab_size_real", known.get("vocab_size_real"))
    if real is None:
        # LiBai pads GPT-2's vocabulary to 50304 on one process and to more under tensor
        # parallelism.
        padded = table.rows is not None and table.rows < rows <= table.rows + _MOST_PADDING
        real = table.rows if padded else rows
    config["vocab_size_real"] = real
    if "max_seq_length" not in config:
        raise UserError(f"{path} has no position embedding, and no settings say how long it is")
    return state, config, generation


def load_into(model: nn.Module, state: Mapping[str, np.ndarray], *, table: Table = GPT2) -> None:
    """Copy weights into a local or global model.

    Every process of a job calls this; rank 0's state counts, the others may be empty. The
    vocabulary is padded with zeros to the model's rows. Names may lack the table's prefix.
    Differences are a UserError on every process, before any parameter has changed.
    """
    targets = dict(model.named_parameters())
    prefix = "" if any(name.startswith(table.prefix) for name in targets) else table.prefix
    wanted = {prefix + name: tuple(target.shape) for name, target in targets.items()}
    state = dict(state)
    for name in table.of_vocabulary:
        if name in state and name in wanted and wanted[name][0] > len(state[name]):
            state[name] = resize_vocabulary(state[name], wanted[name][0])

    def check() -> None:
        report, _ = compare(state, wanted)
        if report:
            raise UserError(
                f"the set of weights does not fit the model: {report.brief()}; was it made for a "
                "model of other sizes?"
            )

    on_rank_0(check)
    with flow.no_grad():
        for name, target in targets.items():
            _assign(target, state.get(prefix + name))


def load_checkpoint(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give a global model of any layout a checkpoint's tensors. CheckpointError where they are
    those of another. A collective call."""
    tensors, arrays = model.state_dict(), checkpoint.model
    wrong = sorted(tensors.keys() - set(arrays))
    for name in [] if wrong else tensors:
        array = arrays[name]
        if array.shape != tuple(tensors[name].shape):
            wrong.append(name)
        else:
            distributed.set_value(tensors[name], array)
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} is of another model: {len(wrong)} parameters are not in it or "
            f"have another shape there, such as {wrong[0]}; resume with the configuration it was "
            "trained with"
        )


def gather_state(model: nn.Module, table: Table = GPT2) -> State:
    """All parameters of a model on rank 0, under LiBai's names; empty elsewhere. Collective."""
    state = {}
    for name, tensor in model.named_parameters():
        value = whole(tensor)
        if distributed.is_main():
            state[table.prefix + name.removeprefix(table.prefix)] = value.float().numpy()
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
    table: Table = GPT2,
) -> None:
    """Write a folder that `transformers` loads; every process of a job calls this.

    Takes a model in any layout or a state dict in LiBai 0.1.1's (rank 0's counts), without rows
    above `vocab_size_real`; other arguments as `huggingface.write`. A UserError is the same on
    every process.
    """
    if isinstance(model_or_state, nn.Module):
        state: Mapping[str, np.ndarray] = gather_state(model_or_state, table)
    else:
        state = model_or_state
    on_rank_0(
        lambda: huggingface.write(
            _without_padding(state, dict(cfg), table),
            dict(cfg),
            Path(folder),
            table,
            dtype=dtype,
            generation=generation,
            tokenizer_files=[Path(file) for file in tokenizer_files],
            force=force,
        )
    )


def _without_padding(state: Mapping[str, np.ndarray], cfg: Config, table: Table) -> State:
    result = {name: np.asarray(array, np.float32) for name, array in state.items()}
    if table.tokens not in result:
        raise UserError(f"the set of weights has no {table.tokens}")
    wanted = table.shapes({**cfg, "vocab_size": len(result[table.tokens])})
    report, _ = compare(result, wanted)
    if report:
        raise MisfitError(report, "the set of weights", "does the configuration belong to it?")
    real = cfg.get("vocab_size_real")
    return result if real is None else table.resized(result, int(real))


def _assign(target: flow.Tensor, array: np.ndarray | None) -> None:
    """Give a parameter rank 0's array, one parameter at a time so that memory stays small."""
    if not distributed.is_main() or array is None:
        array = np.empty(tuple(target.shape), np.float32)
    value = flow.tensor(np.ascontiguousarray(array, np.float32))
    distributed.broadcast([value])
    distributed.set_value(target, value.numpy())
