"""Evaluates a vision model on validation images.

    python -m monarch_flow.validate experiment=imagenet/vitae/tiny eval.ckpt=PATH \
        datamodule.data_dir=DIR [eval.real_labels=real.json]
    python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.validate experiment=...

The configuration is that of `monarch_flow.train`; of DIR only `val/` (or `validation/`) is read.
`--help` lists the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

try:
    from oneflow_accel.errors import UserError

    from omegaconf import DictConfig

    from monarch_flow.command import Command
    from monarch_flow.config import check_data_dir
except ImportError as error:
    sys.exit(
        f"{error}. monarch_flow.validate runs in the project's environment: type `make setup` in "
        "the repository, then `source .venv/bin/activate`."
    )

_HEAD = """\
usage: python -m monarch_flow.validate experiment=NAME eval.ckpt=PATH datamodule.data_dir=DIR
           [GROUP=OPTION ...] [KEY=VALUE ...]
       python -m oneflow.distributed.launch --nproc_per_node N -m monarch_flow.validate ...

Evaluates a vision model on the images in DIR/val (or DIR/validation); DIR/train is not needed.
PATH is a run's folder, a checkpoint, or a file of weights (.pth, .pth.tar, .safetensors); code in
it is not run. The last lines are the accuracies in percent.

flags:
  -h, --help            this text; with an experiment, the values of its keys
  -c, --cfg job         print the configuration instead; --resolve computes and checks what it
                        refers to
  -cd, --config-dir DIR further options of the groups, such as DIR/experiment/mine.yaml

examples:
  ... experiment=imagenet/vitae/tiny eval.ckpt=ViTAE-T.pth.tar datamodule.data_dir=DIR
  ... experiment=imagenet/vitae/tiny eval.ckpt=... eval.real_labels=real.json
  ... experiment=imagenet/vitae/tiny eval.ckpt=... eval.use_ema=false   not the moving averages
  ... experiment=mnist/vit-monarch datamodule.data_dir=DIR              runs/mnist-vit-monarch
"""
_KEYS = (
    "eval.ckpt",
    "eval.use_ema",
    "eval.real_labels",
    "eval.class_map",
    "eval.results_file",
    "eval.run_val",
    "eval.run_test",
    "trainer.accelerator",
    "trainer.limit_val_batches",
    "trainer.log_every_n_steps",
    "datamodule.data_dir",
    "datamodule.class_map",
    "datamodule.allow_empty",
    "datamodule.image_size",
    "datamodule.batch_size_eval",
    "datamodule.num_workers",
    "datamodule.val_transforms.crop_pct",
    "datamodule.val_transforms.interpolation",
    "model.name",
    "model.mlp_cfg",
)


def _adjust(overrides: Sequence[str]) -> list[str]:
    """Put before the typed overrides: evaluate, and only on validation images."""
    first = ["eval.run_val=true", "eval.run_test=false"]
    if not any(text.startswith("mode=") for text in overrides):
        first.insert(0, "mode=eval")
    return [*first, *overrides]


def _check(cfg: DictConfig) -> None:
    """Raise UserError where weights or data are missing."""
    if cfg.eval.ckpt is None or (cfg.eval.ckpt == cfg.run_dir and not Path(cfg.run_dir).exists()):
        raise UserError(
            "which weights? Give eval.ckpt=PATH: a run's folder, a checkpoint, or a file "
            f"(.pth, .pth.tar, .safetensors); without it they are those of run_dir={cfg.run_dir}, "
            "which is not there"
        )
    check_data_dir(cfg)


def last_lines(metrics: Mapping[str, float]) -> str:
    """Four lines as ViTAE's validate.py prints them: accuracy in percent on "val", else "test"."""
    split = "val" if "val/acc" in metrics else "test"
    lines = []
    for name, key in (("", "acc"), (" real", "real_acc")):
        for count, ending in (("1", ""), ("5", "top5")):
            value = metrics.get(f"{split}/{key}{ending}")
            text = "not measured, see eval.real_labels" if value is None else f"{value:.1f}%"
            lines.append(f"Top-{count}{name} accuracy of the model is: {text}")
    return "\n".join(lines)


COMMAND = Command(
    "monarch_flow.validate",
    _HEAD,
    _KEYS,
    adjust=_adjust,
    check=_check,
    report=lambda metrics: print(last_lines(metrics), flush=True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    sys.exit(main())
