"""Makes tests/data/torch_checkpoints/timm_run.pth.tar, a checkpoint of timm's CheckpointSaver, and
timm_run.json, torch's losses of the steps after it. `make bench` sets up the peer's Python:

    PYTHONPATH=. .venv-peer/bin/python tests/golden/make_timm_run.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import torchvision

torchvision.install()

from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.utils import CheckpointSaver, ModelEmaV2  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10, "embed_dim": 16}
MODEL |= {"depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
LR, WEIGHT_DECAY, DECAY, BATCH = 1e-2, 0.05, 0.9, 8
BEFORE, AFTER = 3, 4


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step)
    images = random.standard_normal((BATCH, 1, 28, 28)).astype(np.float32)
    return images, random.integers(0, 10, BATCH)


def main() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(**MODEL)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=LR, weight_decay=WEIGHT_DECAY)
    average = ModelEmaV2(model, decay=DECAY)
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            with tempfile.TemporaryDirectory() as folder:
                saver = CheckpointSaver(
                    model,
                    optimizer,
                    args=argparse.Namespace(model="vit", seed=5, lr=LR, opt_betas=None),
                    model_ema=average,
                    checkpoint_dir=folder,
                    recovery_dir=folder,
                )
                saver.save_checkpoint(epoch=0, metric=12.5)
                target = ROOT / "data" / "torch_checkpoints" / "timm_run.pth.tar"
                shutil.copy(Path(folder) / "last.pth.tar", target)
        images, labels = batch(step)
        loss = torch.nn.functional.cross_entropy(
            model(torch.from_numpy(images)), torch.from_numpy(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        losses.append(loss.item())
    golden = {
        "losses": losses[BEFORE:],
        "head.bias": model.head.bias.tolist(),
        "ema/head.bias": average.module.head.bias.tolist(),
    }
    (ROOT / "golden" / "timm_run.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
