"""The same in PyTorch: timm's ViT, and Monarch layers of two batched matrix products."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers import torchvision
from benchmarks.serve import Maker, Step

BLOCKS = 4


class Monarch(nn.Module):
    """(N, T, width) to (N, T, out), for widths that 4 divides (Dao et al. 2022, section 3.1)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        inner = min(width, out) // BLOCKS
        self.first = nn.Parameter(_uniform(BLOCKS, inner, width // BLOCKS))
        self.second = nn.Parameter(_uniform(BLOCKS, out // BLOCKS, inner))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * x.shape[1]
        middle = torch.bmm(
            x.reshape(rows, BLOCKS, -1).transpose(0, 1), self.first.transpose(1, 2)
        ).transpose(0, 1)
        middle = middle.reshape(rows, -1, BLOCKS).permute(2, 0, 1)
        out = torch.bmm(middle, self.second.transpose(1, 2))
        return out.permute(1, 2, 0).reshape(*x.shape[:2], -1) + self.bias


def _uniform(*shape: int) -> torch.Tensor:
    bound = shape[-1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound)


def vit_s_train(batch: int, mlp: str | None = None) -> Step:
    torchvision.install()
    from timm.models.vision_transformer import VisionTransformer

    def norm(width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=1e-5)

    model = VisionTransformer(
        depth=8, num_heads=8, mlp_ratio=3.0, qkv_bias=False, norm_layer=norm
    ).train()
    if mlp == "monarch":
        for block in model.blocks:
            for name in ("fc1", "fc2"):
                dense = getattr(block.mlp, name)
                setattr(block.mlp, name, Monarch(dense.in_features, dense.out_features))
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MAKERS: dict[str, Maker] = {"vit_s_train": vit_s_train}
