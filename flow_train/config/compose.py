"""Composes a configuration out of a folder of YAML files and KEY=VALUE overrides.

The groups are folders below it, their options the files in them; hydra puts them together. What
comes out is resolved, has every key of a schema, and no other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneflow_accel.errors import UserError, nearest

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flow_train.config.schema import Schema

# Loaded where something is composed: not every program that names a Composer does.
if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# What a file writes where a value has to be given; ??? would not win over an earlier file's null.
REQUIRED = "${required:}"


class Groups:
    """Options by group, such as "model/vitmlp_cfg" or "experiment"; `config_dir` has further
    options of the same groups, and folders in `apart` are not groups. UserError if there is no
    `config_dir`."""

    def __init__(
        self, configs: Path, config_dir: str | None = None, apart: Collection[str] = ()
    ) -> None:
        roots = [configs]
        if config_dir is not None:
            roots.append(Path(config_dir).expanduser())
            if not roots[-1].is_dir():
                raise UserError(f"--config-dir {config_dir}: there is no such folder")
        self._options: dict[str, set[str]] = {}
        for root in roots:
            for file in root.rglob("*.yaml"):
                *folders, name = file.relative_to(root).with_suffix("").parts
                # experiment/imagenet/vit/vit-s.yaml is an option of experiment, and of no
                # experiment/imagenet; model/vitmlp_cfg/fbbfly.yaml is one of model/vitmlp_cfg.
                if folders and folders[0] == "experiment":
                    name, folders = "/".join([*folders[1:], name]), folders[:1]
                if folders and folders[0] not in apart:
                    self._options.setdefault("/".join(folders), set()).add(name)

    def __contains__(self, group: str) -> bool:
        return group in self._options

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._options))

    def options(self, group: str) -> list[str]:
        return sorted(self._options[group])

    def choice(self, group: str, value: Any) -> str:
        """hydra's override for a chosen option, or for several one after the other; UserError names
        the option nearest to one that is not there."""
        names = value if isinstance(value, list) else [value]
        found = [self._option(group, name) for name in names]
        return f"{group}=[{','.join(found)}]" if isinstance(value, list) else f"{group}={found[0]}"

    def unknown(self, group: str) -> str:
        """What to say of a group that is not there."""
        near = nearest(group, self, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"there is no group {group}; {hint}The groups are {', '.join(self)}"

    def _option(self, group: str, value: Any) -> str:
        # null reads like a wish for nothing, which is the option `none` if the group has it.
        name = "none" if value is None else str(value).removesuffix(".yaml")
        if name in self._options[group]:
            return name
        options = self.options(group)
        near = nearest(name, options, most=3, cutoff=0.5)
        if not near:
            # Someone may have typed vit-monarch for mnist/vit-monarch.
            near = [option for option in options if option.rsplit("/", 1)[-1] == name][:3]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        listed = f"The options are {', '.join(options)}" if len(options) <= 20 else "See --help"
        raise UserError(f"{group}={name}: there is no such option; {hint}{listed}")


@dataclass(frozen=True)
class Composed:
    """A configuration as it was put together: `raw` still has its interpolations, as the files and
    overrides have it."""

    raw: DictConfig
    experiment: str | None


@dataclass(frozen=True)
class Composer:
    """Composes the configurations of one program.

    Args:
        configs: the folder of its YAML files, with config.yaml on top.
        example: a right override, for messages.
        renamed: gives an override the name that is meant, for those who type another program's.
        settle: called with the configuration before the overrides of single keys (plain, with its
            interpolations), the one after them, which it may change, and the experiment's name.
        together: raises UserError for keys that do not go together; gets what the schema checked.
        apart: folders of `configs` that are not a group.
    """

    configs: Path
    schema: Schema
    example: str
    renamed: Callable[[str], str] = str
    settle: Callable[[dict[str, Any], DictConfig, str | None], None] = lambda *_: None
    together: Callable[[dict[str, Any]], None] = lambda _: None
    apart: Collection[str] = ()

    def groups(self, config_dir: str | None = None) -> Groups:
        return Groups(self.configs, config_dir, self.apart)

    def compose(self, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
        """The configuration of a run, resolved and checked: every key of the schema.

        Overrides are texts such as "experiment=mnist/vit", "model/vitmlp_cfg=fbbfly" or
        "trainer.max_epochs=10"; `config_dir` has further options, such as DIR/experiment/mine.yaml
        for experiment=mine. UserError for an unknown key, group or option (names the nearest), a
        value of the wrong type or range, or values that do not go together.
        """
        return self.resolve(self.compose_raw(overrides, config_dir))

    def compose_raw(self, overrides: Sequence[str], config_dir: str | None = None) -> Composed:
        """The first half of `compose`: interpolations are not resolved, values not checked."""
        import hydra
        from hydra.errors import HydraException

        groups = self.groups(config_dir)
        choices, settings = self._sorted_out(overrides, groups)
        if config_dir is not None:
            choices.append(f"hydra.searchpath=['file://{Path(config_dir).resolve()}']")
        try:
            with hydra.initialize_config_dir(str(self.configs), job_name="x", version_base="1.3"):
                cfg = hydra.compose("config", choices, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(
                f"the configuration cannot be composed: {_first_line(error)}"
            ) from error
        except yaml.YAMLError as error:
            raise UserError(f"a file is no YAML: {' '.join(str(error).split())}") from error
        experiment = cfg.hydra.runtime.choices.get("experiment")
        OmegaConf.set_struct(cfg, False)
        # Keys that begin with two underscores are the files' own notes.
        for key in ["hydra", *(key for key in cfg if str(key).startswith("__"))]:
            del cfg[key]
        before: Any = OmegaConf.to_container(cfg, resolve=False)
        for text, override in settings:
            self._apply(cfg, text, override, groups)
        self.settle(before, cfg, experiment)
        return Composed(cfg, experiment)

    def resolve(self, composed: Composed) -> DictConfig:
        """The second half of `compose`, with its errors: resolves and checks the values."""
        failures: dict[str, str] = {}
        derived: set[str] = set()
        values = _resolved(composed.raw, "", failures, derived)
        # A value that is computed from a missing one fails too.
        missing = [text for text in failures.values() if text.endswith("=VALUE")]
        if missing:
            raise UserError("\n".join(missing))
        if failures:
            # A wrong value that one of them computes with is the cause, and the better message.
            self._check_without(values, failures, derived)
            raise UserError("\n".join(failures.values()))
        checked = self.schema.check(values, derived)
        self.together(checked)
        cfg = OmegaConf.create(checked)
        OmegaConf.set_struct(cfg, True)
        return cfg

    def _sorted_out(
        self, overrides: Sequence[str], groups: Groups
    ) -> tuple[list[str], list[tuple[str, Override]]]:
        choices, settings = [], []
        for text in map(self.renamed, overrides):
            override = parse_override(text, self.example)
            key = override.key_or_group
            # mode=eval is a choice; mode={...} or model={name: x} is a value.
            if key in groups and not isinstance(override.value(), dict):
                choices.append(groups.choice(key, override.value()))
            elif "/" in key:
                raise UserError(groups.unknown(key))
            elif key.startswith("hydra"):
                raise UserError(
                    f"{text}: hydra's own keys are not in use here; the run's folder is run_dir, "
                    "and further config folders are named by --config-dir"
                )
            else:
                settings.append((text, override))
        return choices, settings

    def _apply(self, cfg: DictConfig, text: str, override: Override, groups: Groups) -> None:
        """Set one key, which must be there already or be in the schema."""
        key = override.key_or_group
        _separate(cfg, key)
        keys, schema = list(config_keys(cfg)), self.schema
        adds = override.is_add() or override.is_force_add()
        if key not in keys and key not in schema and not (adds and schema.is_free(key)):
            raise UserError(f"{text}: {schema.unknown_key(key, [*keys, *groups])}")
        try:
            OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UserError(f"{text}: {key} must be {schema.wanted(key)}") from error

    def _check_without(
        self, values: dict[str, Any], failures: Collection[str], derived: Collection[str]
    ) -> None:
        try:
            self.schema.check(values, derived)
        except UserError as error:
            unset = tuple(f"{path} is not set" for path in failures)
            lines = [line for line in str(error).splitlines() if not line.startswith(unset)]
            if lines:
                raise UserError("\n".join(lines)) from error


def parse_override(text: str, example: str) -> Override:
    """One "key=value" text, or "+key=value" or "++key=value"; `example` is a right one, for
    messages. UserError if it is not an override, removes a key ("~key"), or has several values for
    one key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if text.startswith("~"):
        raise UserError(
            f"{text}: a key cannot be removed; set it to nothing with {text[1:].split('=')[0]}=null"
        )
    if "=" not in text:
        raise UserError(f"{text}: an override reads KEY=VALUE, such as {example}")
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:
        raise UserError(
            f"{text:.200}: {str(error).splitlines()[0]}; put a value with special characters in "
            "quotes: 'key=\"value\"'"
        ) from error
    if override.is_sweep_override():
        raise UserError(f"{text}: one value per key; a list is written [1,2]")
    return override


def config_keys(cfg: DictConfig | ListConfig, prefix: str = "") -> Iterator[str]:
    """Every key of a config with its path, such as "train.dist.tensor_parallel_size"."""
    names = range(len(cfg)) if isinstance(cfg, ListConfig) else list(cfg)
    for name in names:
        path = f"{prefix}{name}"
        yield path
        child = cfg._get_node(name)
        if isinstance(child, DictConfig | ListConfig) and not child._is_none():
            yield from config_keys(child, f"{path}.")


def written(node: DictConfig | ListConfig, name: Any) -> Any:
    """A value as it stands there, an interpolation as its text."""
    child: Any = node._get_node(name)
    return child._value()


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
        if OmegaConf.is_missing(node, name) or written(node, name) == REQUIRED:
            failures[path] = f"{path} is not set: give {path}=VALUE"
            continue
        if OmegaConf.is_interpolation(node, name):
            derived.add(path)
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            text = f"{written(node, name)} cannot be computed: {_first_line(error)}"
            failures[path] = f"{path}: {text}"
            continue
        if isinstance(value, DictConfig | ListConfig):
            value = _resolved(value, f"{path}.", failures, derived)
        values[name] = value
    return values if isinstance(node, DictConfig) else [values[name] for name in values]


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    return (str(cause) or type(cause).__name__).strip().splitlines()[0]


# What the files can compute with, as in `${mul:2,${datamodule.batch_size}}`: hydra has no
# arithmetic, and eval() is not for configuration files.


def world_size() -> int:
    """Number of processes, as the launcher says: a configuration is composed without starting a
    job. UserError if WORLD_SIZE in the environment is not such a number."""
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"WORLD_SIZE={value} in the environment is not a number of processes")
    return int(value)


def _div_up(number: int, by: int) -> int:
    if whole("div_up", number, by)[1] < 1:
        raise ValueError(f"div_up: {by} is not a divisor")
    return -(-number // by)


def whole(name: str, *numbers: Any) -> tuple[int, ...]:
    """The numbers, where they are whole; else a ValueError whose text has `name`."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{name} works on whole numbers, got {number!r}")
    return numbers


def _required() -> None:
    raise ValueError("a value has to be given")


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "required": _required,
    "div_up": _div_up,
    "mul": lambda *numbers: math.prod(whole("mul", *numbers)),
    "add": lambda *numbers: sum(whole("add", *numbers)),
    "world_size": world_size,
}
for _name, _function in _RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _function, replace=True)
