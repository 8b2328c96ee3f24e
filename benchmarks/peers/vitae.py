"""ViTAE (Xu et al. 2021) in eager PyTorch, with the parameter names of the published models.

Reduction cells embed an image at several dilations and add a branch of convolutions; normal cells
add such a branch to attention. The golden values of our tests are this model's in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.models import BOTH
from benchmarks.peers.monarch import MonarchLinear
from benchmarks.serve import Maker, Step

_PERFORMER_DROPOUT = 0.1
_KERNELS, _RATIOS = (7, 3, 3), (4, 2, 2)
_DILATIONS = ((1, 2, 3, 4), (1, 2, 3), (1, 2))

Layer = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Variant:
    """Sizes of a model; widths are one for each of the three stages: channels of each dilated
    convolution, and a token's width after the stage. Depth and heads are those of the normal cells,
    all in the last stage; `mlp_ratio` is the hidden width over a token's, of the MLP and of the
    branch of convolutions, which have `groups`. `patch` is 0, or the side of the patches of a model
    with a class token (Base and larger)."""

    embed_dims: tuple[int, ...]
    token_dims: tuple[int, ...]
    depth: int
    heads: int
    mlp_ratio: int
    groups: int
    patch: int = 0


def _with_class_token(width: int, depth: int, heads: int, groups: int) -> Variant:
    return Variant((width,) * 3, (width,) * 3, depth, heads, 4, groups, patch=16)


VARIANTS = {
    "ViTAE_basic_Tiny": Variant((64, 64, 128), (64, 64, 256), 7, 4, 2, 64),
    "ViTAE_basic_6M": Variant((64, 64, 128), (64, 64, 256), 10, 4, 2, 64),
    "ViTAE_basic_13M": Variant((64, 64, 160), (64, 64, 320), 11, 5, 2, 64),
    "ViTAE_basic_Small": Variant((64, 64, 192), (96, 192, 384), 14, 6, 3, 96),
    "ViTAE_basic_Base": _with_class_token(768, 12, 12, 192),
    "ViTAE_basic_Large": _with_class_token(1024, 24, 16, 256),
    "ViTAE_basic_Huge": _with_class_token(1280, 32, 16, 320),
}


def _to_map(tokens: Tensor) -> Tensor:
    """(N, H W, C) to (N, C, H, W), H = W, without a copy: channels last."""
    side = round(tokens.shape[1] ** 0.5)
    return tokens.transpose(1, 2).unflatten(2, (side, side))


def _to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class _DropPath(nn.Module):
    """Leaves out a residual branch of some samples (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), dtype=x.dtype) >= self.rate
        return x * (kept / (1 - self.rate))


class _DilatedEmbedding(nn.Module):
    """The PRM: convolutions with one kernel at several dilations, side by side."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, dilations: Sequence[int]):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(
                    inner,
                    outer,
                    kernel,
                    stride,
                    # Rounded up.
                    padding=((kernel - 1) * dilation + 2 - stride) // 2,
                    dilation=dilation,
                ),
                nn.GELU(),
            )
            for dilation in dilations
        )

    def forward(self, x: Tensor) -> Tensor:
        return _to_tokens(torch.cat([conv(x) for conv in self.convs], dim=1))


class _PatchEmbedding(nn.Module):
    def __init__(self, inner: int, outer: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(inner, outer, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return _to_tokens(self.proj(x))


class _Performer(nn.Module):
    """Linear attention by positive random features (Choromanski et al. 2021), one head."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.features = width // 2
        self.w = nn.Parameter(torch.randn(self.features, width), requires_grad=False)
        self.kqv = nn.Linear(inner, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(inner), nn.LayerNorm(width)
        self.dropout = nn.Dropout(_PERFORMER_DROPOUT)
        self.mlp = nn.Sequential(
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.Dropout(_PERFORMER_DROPOUT),
        )

    def attention(self, x: Tensor) -> Tensor:
        key, query, value = self.kqv(x).chunk(3, dim=-1)
        key, query = self._phi(key), self._phi(query)
        total = query @ key.sum(dim=1).unsqueeze(-1)
        out = query @ (key.transpose(1, 2) @ value) / (total + 1e-8)
        return value + self.dropout(self.proj(out))

    def _phi(self, x: Tensor) -> Tensor:
        half_squares = (x * x).sum(dim=-1, keepdim=True) / 2
        return torch.exp(x @ self.w.t() - half_squares) / self.features**0.5


class _ReductionCell(nn.Module):
    """Attention between the embedded tokens plus a branch of convolutions, then an MLP; only the
    embedding where there is no performer."""

    def __init__(
        self,
        inner: int,
        embed: int,
        width: int,
        kernel: int,
        ratio: int,
        dilations: Sequence[int],
        performer: bool,
    ) -> None:
        super().__init__()
        self.PRM = _DilatedEmbedding(inner, embed, kernel, ratio, dilations)
        self.has_performer = performer
        if not performer:
            return
        strides = [2 if ratio >> step > 1 else 1 for step in range(3)]
        self.PCM = nn.Sequential(
            nn.Conv2d(inner, embed, 3, strides[0], 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(embed, embed, 3, strides[1], 1),
            nn.BatchNorm2d(embed),
            nn.SiLU(inplace=True),
            nn.Conv2d(embed, width, 3, strides[2], 1),
            nn.SiLU(inplace=True),
        )
        self.attn = _Performer(embed * len(dilations), width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.PRM(x)
        if not self.has_performer:
            return tokens
        attn = self.attn
        tokens = attn.attention(attn.norm1(tokens)) + _to_tokens(self.PCM(x))
        return tokens + attn.mlp(attn.norm2(tokens))


class _TokenStem(nn.Module):
    """The first cell of Base and larger: patches, a class token before them, learned positions."""

    def __init__(self, inner: int, width: int, patch: int, image: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, width))
        self.PRM = _PatchEmbedding(inner, width, patch)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.PRM(x)
        first = self.cls_token.expand(tokens.shape[0], -1, -1)
        return torch.cat([first, tokens], dim=1) + self.pos_embed


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(out.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, layer: Layer) -> None:
        super().__init__()
        self.fc1, self.fc2 = layer(width, hidden), layer(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class _NormalCell(nn.Module):
    """x + attention + convolutions of the same x, then an MLP."""

    def __init__(self, size: Variant, drop_path: float, layer: Layer) -> None:
        super().__init__()
        width = size.token_dims[-1]
        hidden = width * size.mlp_ratio
        self.class_tokens = int(size.patch > 0)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = _Attention(width, size.heads)
        self.mlp = _Mlp(width, hidden, layer)

        def conv(inner: int, outer: int) -> nn.Conv2d:
            return nn.Conv2d(inner, outer, 3, padding=1, groups=size.groups)

        branch = [conv(width, hidden), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)]
        branch.append(conv(hidden, width))
        if not size.patch:
            branch += [nn.BatchNorm2d(width), nn.SiLU(inplace=True), conv(width, width)]
            branch.append(nn.SiLU(inplace=True))
        self.PCM = nn.Sequential(*branch)
        self.drop_path = _DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first = self.class_tokens
        local = self.drop_path(_to_tokens(self.PCM(_to_map(x[:, first:]))))
        x = x + self.drop_path(self.attn(self.norm1(x)))
        x = x + (functional.pad(local, (0, 0, first, 0)) if first else local)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class _Stage(nn.Module):
    def __init__(self, reduction: nn.Module, cells: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.RC = reduction
        self.NC = nn.ModuleList(cells)

    def forward(self, x: Tensor) -> Tensor:
        x = self.RC(x)
        for cell in self.NC:
            x = cell(x)
        return x


class ViTAE(nn.Module):
    """Images (N, 3, H, H) to scores (N, classes). If `monarch`, the layers of the cells' MLPs are
    Monarch, of four blocks; `drop_path` is the rate of the last cell, that of the first is 0;
    `image` counts for models with a class token only."""

    def __init__(
        self,
        size: Variant,
        *,
        monarch: bool = False,
        classes: int = 1000,
        drop_path: float = 0.0,
        image: int = 224,
    ) -> None:
        super().__init__()
        layer: Layer = MonarchLinear if monarch else nn.Linear
        rates = torch.linspace(0, drop_path, size.depth).tolist()
        cells = [_NormalCell(size, rate, layer) for rate in rates]
        width = size.token_dims[-1]
        self.class_tokens = int(size.patch > 0)
        if size.patch:
            stem = _TokenStem(3, width, size.patch, image)
            stages = [_Stage(stem), _Stage(nn.Identity()), _Stage(nn.Identity(), cells)]
        else:
            inner = (3, *size.token_dims[:-1])
            cell_of = [
                _ReductionCell(*sizes, performer=stage < 2)
                for stage, sizes in enumerate(
                    zip(
                        inner,
                        size.embed_dims,
                        size.token_dims,
                        _KERNELS,
                        _RATIOS,
                        _DILATIONS,
                        strict=True,
                    )
                )
            ]
            stages = [_Stage(cell_of[0]), _Stage(cell_of[1]), _Stage(cell_of[2], cells)]
        self.layers = nn.ModuleList(stages)
        if size.patch:
            self.fc_norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for stage in self.layers:
            x = stage(_to_map(x) if x.ndim == 3 and isinstance(stage.RC, _ReductionCell) else x)
        x = x[:, self.class_tokens :].mean(dim=1)
        return self.head(self.fc_norm(x) if self.class_tokens else x)


def _vitae(model: str, monarch: bool, drop_path: float = 0.0) -> ViTAE:
    return ViTAE(VARIANTS[model], monarch=monarch, drop_path=drop_path)


def _inference(model: nn.Module, images: Tensor, dtype: str) -> Step:
    whole = getattr(torch, dtype)
    return BOTH.forward(model.to(whole), images.to(whole))


MAKERS: dict[str, Maker] = {
    "vitae_inference": partial(BOTH.classifier, _inference, _vitae),
    "vitae_train": partial(BOTH.classifier_train, partial(_vitae, drop_path=0.1)),
}
