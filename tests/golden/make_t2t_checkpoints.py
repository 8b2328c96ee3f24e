"""Makes t2t_*.pth in tests/data/torch_checkpoints/ with torch.save, in T2T-ViT's published layouts.

Run it where make_torchvision_resnet.py describes: python tests/golden/make_t2t_checkpoints.py
t2t_expected.npz holds the averaged weights, which both files contain: t2t_ema.pth alone, and
t2t_training.pth beside the last ones, as the script that trained them (timm's) saves a run.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parent.parent / "data" / "torch_checkpoints"
DIM, TOKENS, CLASSES = 8, 5, 3


def names_and_shapes() -> dict[str, tuple[int, ...]]:
    """The published names with one block of toy widths; with 14 blocks they are 184."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, DIM), "pos_embed": (1, TOKENS, DIM)}

    def transformer(prefix: str, inputs: int, width: int) -> None:
        linear = {"attn.proj": (width, width), "mlp.fc1": (width, width), "mlp.fc2": (width, width)}
        shapes[f"{prefix}.attn.qkv.weight"] = (3 * width, inputs)
        for name, (rows, columns) in linear.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name, size in (("norm1", inputs), ("norm2", width)):
            shapes[f"{prefix}.{name}.weight"] = shapes[f"{prefix}.{name}.bias"] = (size,)

    transformer("tokens_to_token.attention1", 12, 4)
    transformer("tokens_to_token.attention2", 36, 4)
    shapes["tokens_to_token.project.weight"] = (DIM, 36)
    shapes["tokens_to_token.project.bias"] = (DIM,)
    transformer("blocks.0", DIM, DIM)
    shapes["norm.weight"] = shapes["norm.bias"] = (DIM,)
    shapes["head.weight"] = (CLASSES, DIM)
    shapes["head.bias"] = (CLASSES,)
    return shapes


def main() -> None:
    torch.manual_seed(0)
    averaged = OrderedDict((name, torch.randn(shape)) for name, shape in names_and_shapes().items())
    last = OrderedDict((f"module.{name}", value + 1) for name, value in averaged.items())
    torch.save({"state_dict_ema": averaged}, FOLDER / "t2t_ema.pth")
    training = {
        "epoch": 309,
        "arch": "T2t_vit_t_14",
        "state_dict": last,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-5}]},
        "args": argparse.Namespace(model="T2t_vit_t_14", lr=5e-4),
        "version": 2,
        "state_dict_ema": OrderedDict((f"module.{name}", v) for name, v in averaged.items()),
        "metric": 81.7,
    }
    torch.save(training, FOLDER / "t2t_training.pth", _use_new_zipfile_serialization=False)
    np.savez_compressed(
        FOLDER / "t2t_expected.npz", **{name: value.numpy() for name, value in averaged.items()}
    )


if __name__ == "__main__":
    main()
