"""The configuration of a run in the run's folder, for people and for the next start."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from flow_train.files import replace_file

YAML = "config.yaml"
TREE = "config_tree.txt"

logger = logging.getLogger("oneflow_accel")


def save_config(cfg: DictConfig, run_dir: Path | str) -> None:
    """Write RUN_DIR/config.yaml and config_tree.txt, and log what changed since the run's last
    start. UserError if the folder cannot be written to."""
    folder = Path(run_dir)
    for key, old, new in config_differences(cfg, folder):
        logger.info("%s: %s, and %s at the run's last start", key, new, old)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / YAML, OmegaConf.to_yaml(cfg, resolve=True).encode())
        replace_file(folder / TREE, config_tree(cfg).encode())
    except OSError as error:
        raise UserError(
            f"run_dir={folder}: the configuration cannot be written there: "
            f"{error.strerror or error}; choose another with run_dir=DIR"
        ) from error


def load_config(run_dir: Path | str) -> DictConfig | None:
    """The configuration that a run was last started with, or None; UserError if the file is not
    YAML."""
    file = Path(run_dir) / YAML
    if not file.is_file():
        return None
    try:
        cfg = OmegaConf.load(file)
    except Exception as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(cfg, DictConfig):
        raise UserError(f"{file} holds no configuration")
    return cfg


def config_differences(cfg: DictConfig, run_dir: Path | str) -> list[tuple[str, Any, Any]]:
    """Keys whose value differs from RUN_DIR/config.yaml: (key, value there, value now)."""
    saved = load_config(run_dir)
    if saved is None:
        return []
    old = _flat(OmegaConf.to_container(saved, resolve=True))
    new = _flat(OmegaConf.to_container(cfg, resolve=True))
    keys = sorted(old.keys() | new.keys())
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def config_tree(cfg: DictConfig) -> str:
    """The configuration as a tree of text, one line per key."""
    tree = Tree("config")
    _grow(tree, OmegaConf.to_container(cfg, resolve=True))
    # The width is so large that no value is folded.
    console = Console(file=io.StringIO(), width=1000, color_system=None, highlight=False)
    console.print(tree)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _grow(tree: Tree, values: Any) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            _grow(tree.add(Text(str(key))), value)
        else:
            tree.add(Text(f"{key}: {value}"))


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
