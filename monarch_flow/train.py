"""Trains or evaluates a vision model with dense or structured layers.

    python -m monarch_flow.train experiment=imagenet/vit/vit-s-butterflyblockdiag-mlp \
        datamodule.data_dir=DIR
    python -m oneflow.distributed.launch --nproc_per_node 4 -m monarch_flow.train experiment=...

`python -m monarch_flow.train --help` lists flags, groups with their options, and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    from monarch_flow.command import Command
except ImportError as error:
    sys.exit(
        f"{error}. monarch_flow.train runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )

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
    "trainer.profile",
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


COMMAND = Command("monarch_flow.train", _HEAD, _KEYS)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become lines on stderr and a non-zero exit code."""
    return COMMAND.main(argv)


if __name__ == "__main__":
    sys.exit(main())
