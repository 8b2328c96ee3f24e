"""Composes the configuration of a run out of configs/*.yaml and KEY=VALUE overrides.

    cfg = compose(["experiment=mnist/vit-monarch", "datamodule.data_dir=DIR"])

The groups are folders below configs/, their options the files in them; hydra puts them together.
What comes out is resolved, has every key of config_schema.Config, and no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import hydra
import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flow_train.config.overrides import config_keys, parse_override
from monarch_flow.config_check import (
    check,
    check_combinations,
    in_schema,
    is_free,
    unknown_key,
    wanted,
)
from monarch_flow.config_groups import CONFIGS, Groups
from monarch_flow.config_resolvers import SCALED_LR, register_resolvers, world_size
from monarch_flow.fly_names import with_our_names

EXAMPLE = "trainer.max_epochs=10"
# What a file writes where a value has to be given; ??? would not win over an earlier file's null.
_REQUIRED = "${required:}"
_LAUNCH = "python -m oneflow.distributed.launch --nproc_per_node {} -m monarch_flow.train ..."


@dataclass(frozen=True)
class Composed:
    """A configuration as it was put together.

    Attributes:
        raw: with its interpolations, as the files and overrides have it.
        experiment: the experiment's name, or None.
    """

    raw: DictConfig
    experiment: str | None


def compose(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The configuration of a run, resolved and checked.

    Args:
        overrides: texts such as "experiment=mnist/vit", "model/vitmlp_cfg=fbbfly" or
            "trainer.max_epochs=10".
        config_dir: a folder with further options of the groups, such as
            DIR/experiment/mine.yaml for experiment=mine.

    Returns:
        Every key of config_schema.Config; setting one that is not there is an error.

    Raises:
        UserError: an unknown key, group or option (names the nearest), a value of the wrong type
            or range, or values that do not go together.
    """
    return resolve(compose_raw(overrides, config_dir))


def compose_raw(overrides: Sequence[str], config_dir: str | None = None) -> Composed:
    """The first half of `compose`: the configuration before interpolations are resolved.

    Raises:
        UserError: an unknown key, group or option.
    """
    register_resolvers()
    groups = Groups(config_dir)
    choices, settings = _sorted_out(overrides, groups)
    if config_dir is not None:
        choices.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
    try:
        with hydra.initialize_config_dir(str(CONFIGS), job_name="train", version_base="1.3"):
            cfg = hydra.compose("config", choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"the configuration cannot be composed: {_first_line(error)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"a file is no YAML: {' '.join(str(error).split())}") from error
    experiment = cfg.hydra.runtime.choices.get("experiment")
    OmegaConf.set_struct(cfg, False)
    # Keys with two underscores are notes of the files to themselves.
    for key in ["hydra", *(key for key in cfg if str(key).startswith("__"))]:
        del cfg[key]
    written = _learning_rate(cfg)
    for text, override in settings:
        _apply(cfg, text, override, groups)
    _settle_learning_rate(cfg, written)
    _complete(cfg, experiment)
    return Composed(cfg, experiment)


def resolve(composed: Composed) -> DictConfig:
    """The second half of `compose`.

    Raises:
        UserError: an interpolation that leads nowhere, a value of the wrong type or range, or
            values that do not go together.
    """
    failures: dict[str, str] = {}
    derived: set[str] = set()
    values = _resolved(composed.raw, "", failures, derived)
    missing = [text for text in failures.values() if text.endswith("=VALUE")]
    if missing:
        # What is computed from them fails too.
        raise UserError("\n".join(missing))
    if failures:
        # A wrong value that an interpolation computes with is the cause, and the better message.
        _check_without(values, failures, derived)
        raise UserError("\n".join(failures.values()))
    checked = check(values, derived)
    check_combinations(checked)
    if checked["mode"] != "eval":
        _check_batch_sizes(checked)
    cfg = OmegaConf.create(checked)
    OmegaConf.set_struct(cfg, True)
    return cfg


def check_data_dir(cfg: DictConfig) -> None:
    """Ask for the data's folder where a run needs one and has none.

    Raises:
        UserError: `datamodule.data_dir` is not set, or is not there.
    """
    dataset, folder = cfg.datamodule.dataset, cfg.datamodule.data_dir
    # An evaluation reads no training images.
    holds = {
        "folder": f"{'' if cfg.mode == 'eval' else 'train/CLASS/IMAGE and '}val/CLASS/IMAGE",
        "mnist": "train-images-idx3-ubyte.gz and the three others",
    }
    if dataset not in holds:
        return
    if folder is None:
        raise UserError(
            "where are the images? Give datamodule.data_dir=DIR, or set DATA_DIR in the "
            f"environment; DIR holds {holds[dataset]}"
        )
    if not Path(folder).exists():
        raise UserError(
            f"datamodule.data_dir={folder} is not there; it is to hold {holds[dataset]}"
        )


def _sorted_out(
    overrides: Sequence[str], groups: Groups
) -> tuple[list[str], list[tuple[str, Override]]]:
    """Choices of options for hydra, and values of keys for us."""
    choices, settings = [], []
    for text in map(with_our_names, overrides):
        override = parse_override(text, EXAMPLE)
        key = override.key_or_group
        # mode=eval is a choice; mode={...} or model={name: x} is a value.
        if key in groups and not isinstance(override.value(), dict):
            choices.append(groups.choice(key, override.value()))
        elif "/" in key:
            raise UserError(groups.unknown(key))
        elif key.startswith("hydra"):
            raise UserError(
                f"{text}: hydra's own keys are not in use here; the run's folder is run_dir, and "
                "further config folders are named by --config-dir"
            )
        else:
            settings.append((text, override))
    return choices, settings


def _apply(cfg: DictConfig, text: str, override: Override, groups: Groups) -> None:
    """Set one key, which has to be there already or to be in the schema."""
    key = override.key_or_group
    _separate(cfg, key)
    keys = list(config_keys(cfg))
    adds = override.is_add() or override.is_force_add()
    if key not in keys and not in_schema(key) and not (adds and is_free(key)):
        raise UserError(f"{text}: {unknown_key(key, [*keys, *groups])}")
    try:
        OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"{text}: {key} is to be {wanted(key)}") from error


def _complete(cfg: DictConfig, experiment: str | None) -> None:
    """What follows from the other keys and can be no interpolation: the run's name, and that there
    is something to evaluate."""
    if _raw(cfg, "name") is None:
        cfg.name = (experiment or "run").replace("/", "-")
    if _raw(cfg.eval, "ckpt") is not None:
        cfg.mode = "eval"
    elif _raw(cfg, "mode") == "eval":
        cfg.eval.ckpt = "${run_dir}"


def _settle_learning_rate(cfg: DictConfig, before: tuple[Any, Any]) -> None:
    """Let optimizer.lr and train.lr_base agree: the one set last says what the learning rate is,
    and the configuration of a run keeps no number that nothing reads.

    Args:
        cfg: with all overrides in it.
        before: what `_learning_rate` gave before the overrides.

    Raises:
        UserError: both are set, and the one does not follow from the other.
    """
    base, rate = _learning_rate(cfg)
    if base is None or rate == SCALED_LR:
        return
    base_is_new, rate_is_new = base != before[0], rate != before[1]
    if base_is_new and not rate_is_new:
        cfg.optimizer.lr = SCALED_LR
    elif rate_is_new and not base_is_new:
        cfg.train.lr_base = None
    else:
        raise UserError(
            f"optimizer.lr={rate} and train.lr_base={base}: only one can say what the learning "
            f"rate is; leave one out, or in a file write optimizer.lr: {SCALED_LR}, which scales "
            "the other, or train.lr_base: null"
        )


def _learning_rate(cfg: DictConfig) -> tuple[Any, Any]:
    """train.lr_base and optimizer.lr as they are written, None where there is none."""
    written: Any = OmegaConf.to_container(cfg, resolve=False)
    train, optimizer = (
        group if isinstance(group, dict) else {}
        for group in (written.get("train"), written.get("optimizer"))
    )
    return train.get("lr_base"), optimizer.get("lr")


def _separate(cfg: DictConfig, key: str) -> None:
    """Give groups on the way to a key that only refer to another group, such as `test_transforms:
    ${.val_transforms}`, keys of their own; else setting one would change the other group."""
    node: Any = cfg
    for part in key.split(".")[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            return
        if OmegaConf.is_interpolation(node, part) and isinstance(node[part], DictConfig):
            node[part] = OmegaConf.to_container(node[part], resolve=False)
        node = node[part]


def _resolved(
    node: DictConfig | ListConfig, prefix: str, failures: dict[str, str], derived: set[str]
) -> Any:
    """Plain values; an interpolation that fails is left out and its message put into `failures`.
    `derived` gets the keys that are interpolations."""
    names = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    values = {}
    for name in names:
        path = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name) or _raw(node, name) == _REQUIRED:
            failures[path] = f"{path} is not set: give {path}=VALUE"
            continue
        if OmegaConf.is_interpolation(node, name):
            derived.add(path)
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            failures[path] = f"{path}: {_raw(node, name)} cannot be computed: {_first_line(error)}"
            continue
        if isinstance(value, DictConfig | ListConfig):
            value = _resolved(value, f"{path}.", failures, derived)
        values[name] = value
    return values if isinstance(node, DictConfig) else [values[name] for name in values]


def _raw(node: DictConfig | ListConfig, name: Any) -> Any:
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return plain[name]


def _check_without(
    values: dict[str, Any], failures: Mapping[str, str], derived: Collection[str]
) -> None:
    """Check what could be resolved."""
    try:
        check(values, derived)
    except UserError as error:
        lines = [
            line
            for line in str(error).splitlines()
            if not any(line.startswith(f"{path} is not set") for path in failures)
        ]
        if lines:
            raise UserError("\n".join(lines)) from error


def _check_batch_sizes(values: Mapping[str, Any]) -> None:
    """The batches of all processes together have to be the global batch."""
    trainer, wanted_size = values["trainer"], values["train"]["global_batch_size"]
    processes, size = trainer["devices"], values["datamodule"]["batch_size"]
    if processes != world_size():
        raise UserError(
            f"trainer.devices={processes}, but this job has {world_size()} process"
            f"{'es' if world_size() > 1 else ''}; leave the key out, or start it with "
            f"{_LAUNCH.format(processes)}"
        )
    batches = trainer["accumulate_grad_batches"]
    if batches * processes * size != wanted_size:
        per_process = wanted_size // processes
        advice = (
            f"train.global_batch_size={batches * processes * size}"
            if wanted_size % processes
            else f"datamodule.batch_size={_divisor(per_process, size)}"
        )
        raise UserError(
            f"train.global_batch_size={wanted_size} is not trainer.accumulate_grad_batches="
            f"{batches} x {processes} processes x datamodule.batch_size={size}, which is "
            f"{batches * processes * size}; {advice} would fit"
        )


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(part for part in range(1, min(number, limit) + 1) if number % part == 0)


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    return (str(cause) or type(cause).__name__).strip().splitlines()[0]
