"""Small runs of the engine: digits that are drawn here, a ViT that trains in a second."""

from __future__ import annotations

import gzip
import json
import logging
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from flow_train.checkpoint.folders import Checkpoint, read_checkpoint

TRAIN_IMAGES, TEST_IMAGES = 192, 48
# Of the training images; 128 are left: 8 batches of 16.
VAL_IMAGES = 64

MONARCH = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
MONARCH_MLP = {
    "_target_": "monarch_flow.layers.MlpCustom",
    "linear1_cfg": MONARCH,
    "linear2_cfg": MONARCH,
}

# Keys that a composed configuration always has.
UNSET = {
    "eval": {"run_val": True, "run_test": True, "use_ema": True}
    | dict.fromkeys(("real_labels", "class_map", "results_file")),
    "trainer": dict.fromkeys(("profile", "limit_val_batches"), None) | {"fast_dev_run": False},
    "train": {"init_from": {"use_ema": True, "reset_head": False}},
    "datamodule": {"class_map": None},
}


def draw_digits(folder: Path) -> Path:
    """Four IDX files as MNIST has them: each class is a bright bar or square of its own place."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    for part, count in (("train", TRAIN_IMAGES), ("t10k", TEST_IMAGES)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = random.integers(0, 60, size=(count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[2 + row * 9 : 8 + row * 9, 1 + column * 7 : 6 + column * 7] += 190
        heads = (struct.pack(">4i", 2051, count, 28, 28), struct.pack(">2i", 2049, count))
        for head, array, name in zip(
            heads, (images, labels), ("images-idx3", "labels-idx1"), strict=True
        ):
            with gzip.open(folder / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(head + array.tobytes())
    return folder


def config(digits: Path, run_dir: Path, *overrides: str, **groups: Any) -> DictConfig:
    """As `monarch_flow.config.compose` gives it, of a tiny run; `groups` replace those here."""
    base: dict[str, Any] = {
        "seed": 3,
        "name": "tiny",
        "run_dir": str(run_dir),
        "resume": None,
        "test_after_training": True,
        "eval": {"ckpt": None, "run_val": True, "run_test": True},
        "trainer": {
            "accelerator": None,
            "devices": 1,
            "min_epochs": 1,
            "max_epochs": 2,
            "max_steps": None,
            "accumulate_grad_batches": 1,
            "gradient_clip_val": None,
            "precision": 32,
            "graph": False,
            "log_every_n_steps": 1,
            "check_val_every_n_epoch": 1,
            "limit_train_batches": None,
            "limit_val_batches": None,
            "fast_dev_run": False,
        },
        "train": {
            "global_batch_size": 16,
            "loss_fn": {"name": "cross_entropy", "label_smoothing": 0.1},
            "loss_fn_val": {"name": "cross_entropy", "label_smoothing": 0.0},
            "scheduler_interval": "epoch",
            "sparse_to_dense": {"fraction": None},
            "init_from": {"path": None, "project": False},
        },
        "datamodule": {
            "dataset": "mnist",
            "data_dir": str(digits),
            "image_size": 28,
            "batch_size": 16,
            "batch_size_eval": 32,
            "num_workers": 0,
            "val_split": VAL_IMAGES,
            "mixup": None,
        },
        "model": {
            "name": "vit_tiny_patch4_28",
            "patch_size": 7,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "mlp_ratio": 2.0,
            "drop_path_rate": 0.0,
            "mlp_cfg": MONARCH_MLP,
        },
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.05},
        "optimizer_param_grouping": {
            "bias_weight_decay": False,
            "normalization_weight_decay": False,
        },
        "scheduler": {
            "name": "cosine",
            "t_initial": 4,
            "lr_min": 1e-5,
            "warmup_t": 1,
            "warmup_lr_init": 1e-3,
        },
        "callbacks": {
            "model_checkpoint": {"monitor": "val/acc", "mode": "max", "save_top_k": 1},
            "early_stopping": None,
            "ema": None,
            "norm_monitor": None,
        },
        "logger": {"csv": None, "tensorboard": {}, "wandb": None},
    }
    return OmegaConf.merge(UNSET, {**base, **groups}, OmegaConf.from_dotlist(list(overrides)))


# Random in all that can be random, and all arrays that a checkpoint may hold.
EVERYTHING = (
    "model.drop_path_rate=0.2",
    "model.drop_rate=0.1",
    "datamodule.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0, prob: 1.0}",
    "datamodule.batch_size=8",
    "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=1.0",
    "callbacks.ema={decay: 0.9}",
)


def values(run_dir: Path, split: str = "train", name: str = "loss") -> dict[int, float]:
    """One metric by step, from the run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: line["values"][name]
        for line in lines
        if line["split"] == split and name in line["values"]
    }


def last_checkpoint(run_dir: Path) -> Checkpoint:
    return read_checkpoint(run_dir / "checkpoints")


def assert_same_run(actual: Path, expected: Path) -> None:
    """Both runs logged the same numbers and ended with the same arrays, to the last bit."""
    for split in ("train", "val", "test", "switch"):
        for name in ("loss", "acc1", "lr", "loss_after"):
            assert values(actual, split, name) == values(expected, split, name), (split, name)
    ours, theirs = last_checkpoint(actual), last_checkpoint(expected)
    for kind in ("model", "optimizer"):
        arrays, others = getattr(ours, kind), getattr(theirs, kind)
        assert arrays.keys() == others.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, others[name], err_msg=name)


def main(paths: Sequence[str]) -> None:
    """Run configuration files; the way of the tests that need processes of their own."""
    from oneflow_accel.errors import UserError

    from monarch_flow.engine.run import run

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    try:
        for path in paths:
            run(OmegaConf.load(path))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(UserError.EXIT_CODE)


if __name__ == "__main__":
    main(sys.argv[1:])
