"""The text of --help: flags, groups with their options, and keys with their values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from flow_train.config.compose import Composer
from flow_train.config.schema import shown

_WIDTH = 100
_FOOT = """
Lists are written [1,2], nothing is null; a text with special characters needs quotes:
'key="value"'. A run's folder is work_dir/name; it holds config.yaml, metrics.jsonl,
curves.png and checkpoints/.
"""


def help_text(
    composer: Composer,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    head: str,
    keys: Sequence[str],
) -> str:
    """What --help prints: `head`, the groups, and `keys` with the values that the overrides on the
    command line give them. UserError for an unknown key, group or option among the overrides."""
    composed = composer.compose_raw(overrides, config_dir)
    raw = OmegaConf.to_container(composed.raw, resolve=False)
    lines = [head, "groups and their options:"]
    groups = composer.groups(config_dir)
    for group in groups:
        lines += _wrapped(f"{group}=", " ".join(groups.options(group)), indent=28)
    where = f" in experiment={composed.experiment}" if composed.experiment else ""
    lines += ["", f"keys, with their values{where}; --cfg job prints all:"]
    descriptions = {name: field.description or "" for name, field in composer.schema.fields()}
    for key in keys:
        text = f"{_short(_at(raw, key))}   {descriptions[key]}".rstrip()
        lines += _wrapped(f"{key}=", text, indent=34)
    return "\n".join(lines) + "\n" + _FOOT


def _wrapped(head: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"  {head}".ljust(indent),
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [f"  {head}"]


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(map(str, value)) + "}"
    return value if isinstance(value, str) else shown(value)
