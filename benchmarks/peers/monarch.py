"""Monarch layers by two batched products, and ViTs with them, in eager PyTorch and timm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import torchvision
from benchmarks.peers.models import BOTH
from benchmarks.serve import Maker


class _Multiply(torch.autograd.Function):
    """Two batched products forward and four backward, which write where the next one reads: the
    fastest of the forms tried here (autograd over two products takes 1.1 to 1.3 times as long)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blkdiag1: Tensor, blkdiag2: Tensor) -> Tensor:
        (blocks1, inner, width1), (blocks2, outer, width2) = blkdiag1.shape, blkdiag2.shape
        rows = x.shape[0]
        middle = x.new_empty(rows, blocks1, inner).transpose(0, 1)
        blocks = x.reshape(rows, blocks1, width1).transpose(0, 1)
        torch.bmm(blocks, blkdiag1.transpose(1, 2), out=middle)
        middle = middle.transpose(0, 1).reshape(rows, width2, blocks2).transpose(1, 2)
        middle = middle.contiguous().transpose(0, 1)
        out = x.new_empty(rows, blocks2, outer).transpose(0, 1)
        torch.bmm(middle, blkdiag2.transpose(1, 2), out=out)
        ctx.save_for_backward(x, blkdiag1, blkdiag2, middle)
        return out.permute(1, 2, 0).reshape(rows, outer * blocks2)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, blkdiag1, blkdiag2, middle = ctx.saved_tensors
        (blocks1, inner, width1), (blocks2, outer, width2) = blkdiag1.shape, blkdiag2.shape
        rows = x.shape[0]
        out_grad = out_grad.reshape(rows, outer, blocks2).transpose(1, 2).contiguous()
        out_grad = out_grad.transpose(0, 1)
        middle_grad = x.new_empty(rows, blocks2, width2).transpose(0, 1)
        torch.bmm(out_grad, blkdiag2, out=middle_grad)
        middle_grad = middle_grad.permute(1, 2, 0).reshape(rows, blocks1, inner).transpose(0, 1)
        x_grad = x.new_empty(rows, blocks1, width1)
        torch.bmm(middle_grad, blkdiag1, out=x_grad.transpose(0, 1))
        blocks = x.reshape(rows, blocks1, width1).transpose(0, 1)
        return (
            x_grad.reshape(x.shape),
            torch.bmm(middle_grad.transpose(1, 2), blocks),
            torch.bmm(out_grad.transpose(1, 2), middle),
        )


class MonarchLinear(nn.Module):
    """(..., inner) to (..., outer), for sizes that the number of blocks divides."""

    def __init__(self, inner: int, outer: int, blocks: int = 4) -> None:
        super().__init__()
        width1, width2 = inner // blocks, outer // blocks
        between = min(width1, width2)
        self.blkdiag1 = nn.Parameter(torch.empty(blocks, between, width1))
        self.blkdiag2 = nn.Parameter(torch.empty(blocks, width2, between))
        self.bias = nn.Parameter(torch.zeros(outer))
        for factor in (self.blkdiag1, self.blkdiag2):
            bound = factor.shape[-1] ** -0.5
            nn.init.uniform_(factor, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        out = _Multiply.apply(x.reshape(-1, x.shape[-1]), self.blkdiag1, self.blkdiag2)
        return out.reshape(*x.shape[:-1], -1) + self.bias


def _layer(inner: int, outer: int, monarch: bool) -> nn.Module:
    return MonarchLinear(inner, outer) if monarch else nn.Linear(inner, outer)


def _vit(monarch: bool) -> nn.Module:
    """As monarch_flow's vit_small_patch16_224, which is wider and shallower than timm's."""
    torchvision.install()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        embed_dim=768,
        depth=8,
        num_heads=8,
        mlp_ratio=3.0,
        qkv_bias=False,
        norm_layer=partial(nn.LayerNorm, eps=1e-5),
    )
    if monarch:
        for block in model.blocks:
            block.mlp.fc1, block.mlp.fc2 = MonarchLinear(768, 2304), MonarchLinear(2304, 768)
    return model


MAKERS: dict[str, Maker] = {
    "layer_forward": partial(BOTH.layer_forward, _layer),
    "layer_train": partial(BOTH.layer_train, _layer),
    "monarch_vit_forward": partial(BOTH.classifier, BOTH.forward, _vit),
    "monarch_vit_train": partial(BOTH.classifier_train, _vit),
}
