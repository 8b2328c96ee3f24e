"""Training steps of the ViT-S/16 of the Monarch paper, dense and with Monarch MLPs."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from benchmarks.serve import Maker, Step
from monarch_flow.models import create_model


def vit_s_train(batch: int, mlp: str | None = None) -> Step:
    """Forward, backward and AdamW.

    Args:
        batch: images.
        mlp: layers of the MLPs: None for dense, or "monarch", of 4 blocks.
    """
    model = create_model("vit_small_patch16_224", mlp_cfg=mlp)
    model.train()
    images, labels = flow.randn(batch, 3, 224, 224), flow.randint(0, 1000, (batch,))
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MAKERS: dict[str, Maker] = {"vit_s_train": vit_s_train}
