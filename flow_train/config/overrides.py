"""The KEY=VALUE texts of a command line, in hydra's grammar, and the names they may mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, ListConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def parse_override(text: str, example: str) -> Override:
    """One "key=value" text, or "+key=value" or "++key=value"; `example` is a right one, for
    messages. UserError if it is not an override, removes a key ("~key"), or has several values for
    one key."""
    if text.startswith("~"):
        raise UserError(
            f"{text}: a key cannot be removed; set it to nothing with {text[1:].split('=')[0]}=null"
        )
    if "=" not in text:
        raise UserError(f"{text}: an override reads KEY=VALUE, such as {example}")
    # Here, as importing hydra takes 0.1 s, also where there are no overrides.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

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
