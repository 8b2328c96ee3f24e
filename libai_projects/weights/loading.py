"""Reads weights of any of the three kinds into LiBai 0.1.1's layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from libai_projects.weights import configs, huggingface, libai_checkpoints, mapping
from libai_projects.weights.configs import Config
from libai_projects.weights.mapping import MisfitError, Report, State

MODES = ("huggingface", "libai", "upstream")
_PARTIAL_HINT = "is it the right model? --partial takes what fits"

logger = logging.getLogger("libai_projects")


@dataclass
class Loaded:
    """Weights and what is known about their model.

    Attributes:
        state: LiBai 0.1.1's names and layout, float32, the token embedding with the rows of the
            real vocabulary.
        config: keys of `cfg.model.cfg` that are known: sizes, dropout, epsilon, activation;
            `vocab_size` and `vocab_size_real` are both the real vocabulary. A LiBai checkpoint
            without its config.yaml does not tell `num_attention_heads`.
        generation: bos_token_id, eos_token_id and pad_token_id, as far as they are known.
        report: what was left out under `partial`.
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
    partial: bool = False,
) -> tuple[State, Config]:
    """Read a model's weights and settings. Every process of a job has to call this.

    Rank 0 reads; the other processes get an empty state, which `load_into` accepts, and the same
    settings or the same error.

    Args:
        path: huggingface: a folder with config.json and weights; libai and upstream: a checkpoint
            or the `model` folder in it.
        mode: one of MODES.
        overrides: settings that the files do not tell or tell wrongly, such as
            num_attention_heads, vocab_size_real or activation.
        partial: leave out what is missing or does not fit, with a warning that lists it.

    Returns:
        The state and the settings, as `Loaded` describes them.

    Raises:
        UserError: the path, a file in it or the model is not what the mode says; counts missing,
            unexpected and mis-shaped names.
    """
    loaded, failure = Loaded({}, {}), None
    if distributed.is_main():
        try:
            loaded = read(path, mode, overrides=overrides, partial=partial)
        except MisfitError as error:
            # Those who have to know each name convert the weights, and those can leave some out.
            failure = f"{error.brief}; is it the right model?"
        except UserError as error:
            failure = str(error)
        if loaded.report:
            logger.warning("%s: not all of it was taken\n%s", path, loaded.report)
    config, failure = distributed.all_gather_json([loaded.config, failure])[0]
    if failure is not None:
        raise UserError(failure)
    return loaded.state, config


def read(
    path: str | os.PathLike[str],
    mode: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> Loaded:
    """What `load` does, in this process alone, and all that was found.

    Raises:
        UserError: as `load`.
    """
    if mode not in MODES:
        raise UserError(f"weights of kind {mode!r}; expected one of {', '.join(MODES)}")
    unknown = sorted(set(overrides or {}) - configs.MODEL_KEYS)
    if unknown:
        raise UserError(f"unknown model settings: {', '.join(unknown)}")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    if mode == "huggingface":
        return _read_huggingface(Path(path), given, partial)
    return _read_libai(Path(path), given, partial, upstream=mode == "upstream")


def _read_huggingface(folder: Path, overrides: Config, partial: bool) -> Loaded:
    config = {**huggingface.read_config(folder), **overrides}
    configs.check_heads(config, folder)
    state = huggingface.read_state(folder)
    # The report has the file's own names.
    wanted = {
        mapping.huggingface_name(name): shape
        for name, shape in mapping.expected_shapes(config).items()
    }
    report = mapping.compare(mapping.shapes_of(state), wanted)
    if not partial:
        report.require_none(str(folder), _PARTIAL_HINT)
    state = mapping.from_huggingface(
        mapping.keep_fitting(state, wanted), config["num_attention_heads"]
    )
    generation = huggingface.read_generation(folder)
    return _cut_vocabulary(Loaded(state, config, generation, report), folder)


def _read_libai(path: Path, overrides: Config, partial: bool, *, upstream: bool) -> Loaded:
    state = mapping.clean_libai(libai_checkpoints.read_state(path))
    try:
        if mapping.linear_is_out_in(state, default=upstream):
            state = mapping.transpose_linear(state)
        known, generation = libai_checkpoints.read_settings(path)
        # Sizes are those of the tensors: a settings file may be another run's.
        config = {"activation": "gelu_tanh", **known, **configs.from_shapes(state), **overrides}
    except UserError as error:
        raise UserError(f"cannot use {path}: {error}") from error
    rows = config["vocab_size"]
    real = overrides.get("vocab_size_real", known.get("vocab_size_real"))
    config["vocab_size_real"] = configs.real_vocabulary(rows, real)
    if "max_seq_length" not in config:
        raise UserError(f"{path} has no position embedding, and no settings say how long it is")
    wanted = mapping.expected_shapes(config)
    report = mapping.compare(mapping.shapes_of(state), wanted)
    if not partial:
        report.require_none(str(path), _PARTIAL_HINT)
    state = mapping.keep_fitting(state, wanted)
    return _cut_vocabulary(Loaded(state, config, generation, report), path)


def _cut_vocabulary(loaded: Loaded, path: Path) -> Loaded:
    """Leave the rows of the real vocabulary."""
    rows, real = loaded.config["vocab_size"], loaded.config["vocab_size_real"]
    if real > rows:
        raise UserError(f"{path} has {rows} rows of vocabulary, fewer than {real} tokens")
    tokens = loaded.state.get(mapping.TOKEN_EMBEDDING)
    if tokens is not None:
        loaded.state[mapping.TOKEN_EMBEDDING] = tokens[:real]
    loaded.config["vocab_size"] = real
    return loaded
