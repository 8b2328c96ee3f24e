"""Config files and the KEY=VALUE overrides of the command line; a misspelled key is an error."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneflow_accel.errors import UserError, did_you_mean

from libai.config import LazyConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flow_train.config.overrides import config_keys, parse_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# These keys may be null even where a config sets a value; the common configs say what it means.
_MAY_BE_NULL = (
    # Any two of the batch sizes give the third.
    "train.train_micro_batch_size",
    "train.global_batch_size",
    "train.num_accumulation_steps",
    "train.max_minutes",
    "train.sparse_to_dense.fraction",
    "train.logger.csv",
    "train.logger.wandb",
    "train.evaluation.patience",
    "train.evaluation.eval_after_n_epoch",
    "train.checkpointer.save_model_after_n_epoch",
    "train.checkpointer.max_to_keep",
    "train.dist.data_parallel_size",
    "train.dist.custom_pipeline_stage_id",
    "train.dist.device_type",
    "optim.params.clip_grad_max_norm",
    "model.cfg.mlp_cfg",
    "model.cfg.attnlinear_cfg",
    "model.cfg.attnproj_cfg",
    "model.cfg.bias_gelu_fusion",
    "model.cfg.bias_dropout_fusion",
    "model.cfg.scale_mask_softmax_fusion",
    "model.cfg.attention_fusion",
)


def load_config(path: str) -> DictConfig:
    """Load a config file; a UserError names the file and the line where running it fails."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config-file {path}: there is no such file below {os.getcwd()}")
    if file.suffix not in (".py", ".yaml", ".yml"):
        raise UserError(f"--config-file {path}: a config ends in .py or .yaml")
    try:
        return LazyConfig.load(path)
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        line = f", line {_line_in(file, cause)}" if _line_in(file, cause) else ""
        text = cause.msg if isinstance(cause, SyntaxError) else cause
        raise UserError(f"{path}{line}: {type(cause).__name__}: {text}") from error


def _line_in(file: Path, error: BaseException) -> int | None:
    """The line of `file` that raised, the innermost one."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def apply_overrides(cfg: DictConfig, overrides: Iterable[str], config_file: str) -> DictConfig:
    """Change `cfg` by "key=value" texts (hydra's grammar) and return it.

    "+key=value" adds a key that is not there, "++key=value" sets it in either case. Raises
    UserError for an unknown key (naming the nearest) or a value of another type than the key's.
    """
    for text in overrides:
        override = parse_override(text, "train.train_iter=100")
        key = override.key_or_group
        adds = override.is_add() or override.is_force_add()
        exists = _exists(cfg, key)
        if override.is_add() and exists and not override.is_force_add():
            raise UserError(f"+{key}: {config_file} has this key already; leave out the '+'")
        if not exists and not adds:
            raise UserError(_unknown_key(cfg, key, config_file))
        value = override.value()
        if exists:
            value = _checked(key, OmegaConf.select(cfg, key), value, override, config_file)
        try:
            OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UserError(f"{text}: {error}") from error
    return cfg


def _exists(cfg: DictConfig, key: str) -> bool:
    node: Any = cfg
    for part in key.split("."):
        if isinstance(node, ListConfig):
            if not part.isdigit() or int(part) >= len(node):
                return False
            node = node[int(part)]
        elif isinstance(node, DictConfig) and part in node:
            # Not node[part]: that resolves, and an interpolation may point at what is not set yet.
            child = node._get_node(part)
            node = child if isinstance(child, DictConfig | ListConfig) else None
        else:
            return False
    return True


def _unknown_key(cfg: DictConfig, key: str, config_file: str) -> str:
    hint = did_you_mean(key, config_keys(cfg), f"its top keys are {', '.join(cfg)}")
    return f"{config_file} has no key {key}; {hint} (+{key}=... adds a new one)"


def _checked(key: str, now: Any, value: Any, override: Override | None, config_file: str) -> Any:
    """`value` if it may take the place of `now`; numbers are turned into what `now` is."""
    if isinstance(value, str) and value.startswith("${"):
        return value
    if value is None:
        if now is None or isinstance(now, str) or key in _MAY_BE_NULL:
            return None
        raise UserError(f"{key}=null: {config_file} has {_kind(now)} there, and it is needed")
    if isinstance(now, DictConfig):
        if not isinstance(value, dict):
            keys = ", ".join(f"{key}.{name}" for name in list(now)[:3])
            raise UserError(f"{key} holds several keys ({keys}, ...); set one of those")
        for name, inner in value.items():
            if name not in now:
                raise UserError(_unknown_key(now, str(name), f"{key} of {config_file}"))
            value[name] = _checked(f"{key}.{name}", now.get(name), inner, None, config_file)
        return value
    if isinstance(now, str) and not isinstance(value, str) and override is not None:
        # A directory called 2024 is read as a number.
        return override.get_value_element_as_str()
    if isinstance(now, bool) or isinstance(value, bool):
        fits = isinstance(now, bool) == isinstance(value, bool) or now is None
    elif isinstance(now, int):
        fits = isinstance(value, int)
    elif isinstance(now, float):
        fits = isinstance(value, int | float)
        value = float(value) if fits else value
    elif isinstance(now, ListConfig):
        fits = isinstance(value, list)
    elif isinstance(now, str):
        fits = isinstance(value, str)
    else:
        fits = True
    if not fits:
        raise UserError(f"{key}={value}: {config_file} has {_kind(now)} there, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    for types, name in (
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        ((list, ListConfig), "a list"),
        ((dict, DictConfig), "a group of keys"),
    ):
        if isinstance(value, types):
            return name
    return type(value).__name__
