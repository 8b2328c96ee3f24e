"""A LiBai config: its file, the KEY=VALUE of a command line, and the schema of its keys.

A config may have other keys too, of LiBai, of a model or of a user: what is typed for one of them
must be of the type that the config has there.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from oneflow_accel.agree import plain_values
from oneflow_accel.errors import UserError, did_you_mean

import numpy as np
from libai.config import LazyConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flow_train.config.compose import config_keys, parse_override
from flow_train.config.keys import Above0, Amount, Below1, Count, Fraction, Positive, Seed
from flow_train.config.schema import Text, Wanted, phrase, shown
from libai_projects.models.gpt2.options import FUSIONS

# What each key may be; configs/common says what they mean.
SCHEMA: dict[str, Any] = {
    "train.output_dir": Text,
    "train.load_weight": Text | None,
    "train.train_micro_batch_size": Positive | None,
    "train.global_batch_size": Positive | None,
    "train.num_accumulation_steps": Positive | None,
    "train.test_micro_batch_size": Positive,
    "train.train_iter": Count,
    "train.train_epoch": Amount,
    "train.warmup_ratio": Below1,
    "train.amp.enabled": bool,
    "train.activation_checkpoint.enabled": bool,
    "train.zero_optimization.enabled": bool,
    "train.zero_optimization.stage": Annotated[int, Field(ge=0, le=3)],
    "train.checkpointer.period": Positive,
    "train.checkpointer.max_to_keep": Positive | None,
    "train.checkpointer.save_model_after_n_epoch": Positive | None,
    "train.evaluation.enabled": bool,
    "train.evaluation.eval_period": Positive,
    "train.evaluation.eval_after_n_epoch": Positive | None,
    "train.evaluation.eval_iter": Positive,
    "train.evaluation.eval_metric": Text | None,
    "train.evaluation.eval_mode": Literal["min", "max"] | None,
    "train.evaluation.patience": Positive | None,
    "train.sparse_to_dense.fraction": Fraction | None,
    "train.max_minutes": Above0 | None,
    "train.log_period": Positive,
    "train.logger.csv": Any,
    "train.logger.wandb": dict[str, Any] | None,
    "train.seed": Seed,
    "train.start_iter": Count,
    "train.dist.data_parallel_size": Positive | None,
    "train.dist.tensor_parallel_size": Positive,
    "train.dist.pipeline_parallel_size": Positive,
    "train.dist.pipeline_num_layers": Positive | None,
    "train.dist.custom_pipeline_stage_id": list[int] | None,
    "train.dist.device_type": Text | None,
    "train.nccl_fusion_threshold_mb": Count,
    "train.nccl_fusion_max_ops": Count,
    "dataloader.train.num_workers": Count,
    "tokenization.make_vocab_size_divisible_by": Positive,
    "optim.params.clip_grad_max_norm": Above0 | None,
    "optim.params.clip_grad_norm_type": Amount | None,
    "optim.params.weight_decay_norm": Amount | None,
    "optim.params.weight_decay_bias": Amount | None,
    # The model checks these itself.
    "model.cfg.mlp_cfg": Any,
    "model.cfg.attnlinear_cfg": Any,
    "model.cfg.attnproj_cfg": Any,
    **{f"model.cfg.{name}": bool | None for name in FUSIONS},
    "graph.enabled": bool,
}
# What other keys may be, by the type of what a config has there.
_TYPES = {bool: bool, int: int, float: float, str: Text | None, ListConfig: list[Any]}
_ABSENT = object()
# Operators hold whole numbers as int32 or add them up in int64, seeds are int64, and scores and
# weights are float32.
_MOST, _MOST_SEED, _MOST_FLOAT = 2**31 - 1, 2**63 - 1, float(np.finfo(np.float32).max)


def check_keys(cfg: DictConfig) -> None:
    """Check the keys of the schema that a config has; null is as if one were not there. The
    UserError lists each that is wrong, and each number, of any key, that is not finite or too large
    for what holds it."""
    wrong = []
    # An interpolation is a text here: what it points at has its own key.
    for key, value in plain_values(OmegaConf.to_container(cfg), ()).items():
        most = _MOST_FLOAT if isinstance(value, float) else _MOST
        most = _MOST_SEED if key.endswith("seed") else most
        if isinstance(value, float) and not math.isfinite(value):
            wrong.append(f"{key}={value} is not finite")
        elif isinstance(value, int | float) and abs(value) > most:
            wrong.append(f"{key}={value} is beyond {most}, the largest that there is")
    for key, kind in SCHEMA.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and (text := _why_not(key, value, kind)):
            wrong.append(text)
    if wrong:
        raise UserError("\n  - ".join(wrong))


def _why_not(key: str, value: Any, kind: Any) -> str:
    """What is wrong with a key's value; "" if nothing is."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(plain)
    except ValidationError:
        return f"{key}={shown(plain)}: it must be {phrase(FieldInfo.from_annotation(kind))}"
    return ""


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
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == file
    ]
    return lines[-1] if lines else None


def apply_overrides(cfg: DictConfig, overrides: Iterable[str], config_file: str) -> DictConfig:
    """Change `cfg` by "key=value" texts (hydra's grammar) and return it.

    "+key=value" adds a key that is not there, "++key=value" sets it in either case. Raises
    UserError for an unknown key (naming the nearest) or a value that the key cannot have.
    """
    for text in overrides:
        override = parse_override(text, "train.train_iter=100")
        key, value = override.key_or_group, override.value()
        try:
            is_there = OmegaConf.select(cfg, key, default=_ABSENT) is not _ABSENT
            if is_there and override.is_add():
                raise UserError(f"+{key}: {config_file} has this key already; leave out the '+'")
            if is_there or not (override.is_add() or override.is_force_add()):
                value = _checked(cfg, key, value, config_file)
            OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UserError(f"{text}: {error}") from error
    return cfg


def _checked(cfg: DictConfig, key: str, value: Any, config_file: str) -> Any:
    """`value`, if it may take the place of what the config has, as a text or float where that is
    one."""
    now = OmegaConf.select(cfg, key, default=_ABSENT)
    if now is _ABSENT:
        hint = did_you_mean(key, config_keys(cfg), f"its top keys are {', '.join(cfg)}")
        raise UserError(f"{config_file} has no key {key}; {hint} (+{key}=... adds a new one)")
    kind = SCHEMA.get(key, _TYPES.get(type(now), Any))
    if isinstance(now, DictConfig):
        if isinstance(value, dict):
            return {n: _checked(cfg, f"{key}.{n}", v, config_file) for n, v in value.items()}
        kind = SCHEMA.get(key, Annotated[dict, Wanted(f"a group of keys ({', '.join(now)})")])
    if (value is None and now is None) or (isinstance(value, str) and value.startswith("${")):
        return value
    if isinstance(now, str) and isinstance(value, int | float):
        # A directory called 2024 is read as a number.
        value = str(value)
    if wrong := _why_not(key, value, kind):
        raise UserError(wrong)
    return float(value) if isinstance(now, float) and value is not None else value


def name_of(config: Any) -> str:
    """Name of the class or function that a config node calls; "" where it calls none."""
    target = config.get("_target_", "") if isinstance(config, DictConfig) else ""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rpartition(".")[2]
