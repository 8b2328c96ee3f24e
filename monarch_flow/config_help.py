"""The text of --help: flags, groups with their options, and keys with their values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from monarch_flow.config import compose_raw
from monarch_flow.config_check import in_schema, schema_fields
from monarch_flow.config_groups import Groups

_WIDTH = 100
_HEAD = """\
usage: python -m monarch_flow.train experiment=NAME [GROUP=OPTION ...] [KEY=VALUE ...]
       python -m oneflow.distributed.launch --nproc_per_node N -m monarch_flow.train ...

Trains or evaluates a vision model with dense or structured layers.

flags:
  -h, --help            this text; with an experiment, the values of its keys
  -c, --cfg job         print the configuration instead of training; --resolve computes and checks
                        what it refers to
  -cd, --config-dir DIR further options of the groups, such as DIR/experiment/mine.yaml

examples:
  ... experiment=mnist/vit-monarch datamodule.data_dir=DIR
  ... experiment=imagenet/vit/vit-s model/vitmlp_cfg=fbbflylr optimizer.lr=5e-4
  ... experiment=imagenet/vitae/tiny-monarch datamodule.batch_size=128 train.lr_base=1e-3
  ... experiment=mnist/vit mode=smoke datamodule.data_dir=DIR    does it run at all?
  ... experiment=mnist/vit resume=auto datamodule.data_dir=DIR   goes on where it stopped
  ... experiment=mnist/vit eval.ckpt=PATH datamodule.data_dir=DIR
"""
# The keys that most runs set; --cfg job prints all.
_KEYS = (
    "seed",
    "name",
    "work_dir",
    "resume",
    "eval.ckpt",
    "eval.use_ema",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.precision",
    "trainer.graph",
    "trainer.gradient_clip_val",
    "trainer.limit_train_batches",
    "trainer.fast_dev_run",
    "train.global_batch_size",
    "train.loss_fn.label_smoothing",
    "train.sparse_to_dense.fraction",
    "train.init_from.path",
    "train.init_from.project",
    "train.init_from.reset_head",
    "datamodule.data_dir",
    "datamodule.image_size",
    "datamodule.batch_size",
    "datamodule.num_workers",
    "datamodule.mixup",
    "model.name",
    "model.drop_path_rate",
    "model.mlp_cfg",
    "model.attnlinear_cfg",
    "optimizer.lr",
    "train.lr_base",
    "optimizer.weight_decay",
    "scheduler.warmup_t",
    "callbacks.ema",
)


def help_text(
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    head: str = _HEAD,
    keys: Sequence[str] = _KEYS,
) -> str:
    """What --help prints.

    Args:
        overrides: those on the command line; the keys are shown with the values these give.
        config_dir: a folder with further options.
        head: usage, flags and examples.
        keys: those to list.

    Raises:
        UserError: an unknown key, group or option among the overrides.
    """
    composed = compose_raw(overrides, config_dir)
    raw = OmegaConf.to_container(composed.raw, resolve=False)
    lines = [head, "groups and their options:"]
    groups = Groups(config_dir)
    for group in groups:
        lines += _wrapped(f"{group}=", " ".join(groups.options(group)), indent=28)
    lines += ["", f"keys, with their values{_of(composed.experiment)}; --cfg job prints all:"]
    descriptions = {name: field.description or "" for name, field in schema_fields()}
    for key in keys:
        assert in_schema(key), key
        text = f"{_short(_at(raw, key))}   {descriptions[key]}".rstrip()
        lines += _wrapped(f"{key}=", text, indent=34)
    lines += [
        "",
        "Lists are written [1,2], nothing is null; a text with special characters needs quotes:",
        "'key=\"value\"'. A run's folder is work_dir/name; it holds config.yaml, metrics.jsonl,",
        "curves.png and checkpoints/.",
    ]
    return "\n".join(lines) + "\n"


def _of(experiment: str | None) -> str:
    return f" in experiment={experiment}" if experiment else ""


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
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(map(str, value)) + "}"
    return str(value)
