"""ViTAE, a vision transformer with convolutions beside its attention (Xu et al. 2021), and the
large ones, B to H (Zhang et al. 2022, "ViTAEv2"): a ViT's patch embedding and class token, then
normal cells with shallow convolutions.

`oneflow_accel.inference.prepare()` makes one layer of a convolution and the batch norm and SiLU
after it, in float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow_accel.backends import current_backend
from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container, map_layer
from oneflow_accel.kernels.convolution import channels_last_conv2d
from oneflow_accel.kernels.transformer import SiLU

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike, MlpLike
from monarch_flow.layers.config import check_positive
from monarch_flow.models.attention import TokenPerformer
from monarch_flow.models.blocks import (
    Block,
    Classifier,
    Grid,
    PatchEmbed,
    Size,
    TokenMean,
    channels_last,
    check_images,
    convolved,
    drop_path,
    drop_path_rates,
    init_transformer,
    map_to_tokens,
    prepend_token,
    tokens_to_map,
)

# (kernel, stride, dilations) of the three reduction cells.
REDUCTIONS = ((7, 4, (1, 2, 3, 4)), (3, 2, (1, 2, 3)), (3, 2, (1, 2)))
# Of the normal cells.
NORM_EPS = 1e-6


@map_layer
class MapConv2d(nn.Conv2d):
    """nn.Conv2d that takes and returns (N, H, W, C). Its weight is (O, C / groups, h, w)."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return channels_last_conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


@map_layer
class MapBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d that takes and returns (N, H, W, C)."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.channel_axis = 3

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        if self.training or current_backend().supports("nhwc"):
            # No super(): under nn.Graph `self` is a proxy of the module.
            return nn.BatchNorm2d.forward(self, x)
        # OneFlow's own kernel for CPUs ends the process here.
        scale = self.weight * flow.rsqrt(self.running_var + self.eps)
        return (x - self.running_mean) * scale + self.bias


def reduction_strides(ratio: int) -> tuple[int, int, int]:
    """Strides of three convolutions that together make a map `ratio` times smaller each way."""
    first, second, third = (2 if ratio > 2**before else 1 for before in range(3))
    return first, second, third


class ReductionBranch(nn.Sequential):
    """Maps (N, H, W, in_chans) to (N, H / ratio, W / ratio, out_chans), rounded up.

    Three convolutions, each with a SiLU after it; batch norm only after the second. `ratio` is a
    power of 2 up to 8.
    """

    def __init__(self, in_chans: int, width: int, out_chans: int, ratio: int) -> None:
        first, second, third = reduction_strides(ratio)
        super().__init__(
            MapConv2d(in_chans, width, 3, first, 1),
            SiLU(),
            MapConv2d(width, width, 3, second, 1),
            MapBatchNorm2d(width),
            SiLU(),
            MapConv2d(width, out_chans, 3, third, 1),
            SiLU(),
        )


class CellBranch(nn.Sequential):
    """Maps (N, H, W, dim) to the same; UserError where `groups` does not divide the channels.

    Grouped convolutions to the width `hidden` and back, each with batch norm and SiLU, then one
    more of width `dim`. The shallow kind ends with the second convolution.
    """

    def __init__(self, dim: int, hidden: int, groups: int, *, shallow: bool = False) -> None:
        if groups < 1 or dim % groups or hidden % groups:
            raise UserError(
                f"conv_groups={groups} does not divide the {dim} channels of a cell and the "
                f"{hidden} inside it"
            )
        layers = [
            MapConv2d(dim, hidden, 3, padding=1, groups=groups),
            MapBatchNorm2d(hidden),
            SiLU(),
            MapConv2d(hidden, dim, 3, padding=1, groups=groups),
        ]
        if not shallow:
            layers += [
                MapBatchNorm2d(dim),
                SiLU(),
                MapConv2d(dim, dim, 3, padding=1, groups=groups),
                SiLU(),
            ]
        super().__init__(*layers)


@bfloat16_container
class NormalCell(Block):
    """x + attention(norm1(x)) + PCM(x), then x + mlp(norm2(x)): (N, tokens, dim) to the same.

    The PCM, convolutions on the map of the tokens, sees the cell's input as it is. In training each
    of the three branches of each sample is left out with probability `drop_path_rate`,
    independently.

    Args:
        mlp_ratio: hidden width of MLP and PCM over `dim`.
        shallow: whether the PCM has only two convolutions, see `CellBranch`.
        class_token: whether the first token is outside the map; the PCM does not see it.
        options: of `Block`.

    Raises:
        UserError: heads or groups do not divide the width, or a config is wrong.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        conv_groups: int,
        *,
        shallow: bool = False,
        class_token: bool = False,
        drop_path_rate: float,
        **options: Any,
    ) -> None:
        options |= {"qkv_bias": True, "norm_eps": NORM_EPS, "drop_path_rate": drop_path_rate}
        super().__init__(dim, num_heads, mlp_ratio, **options)
        self.class_token = class_token
        self.drop_path_local = drop_path(drop_path_rate)
        self.PCM = CellBranch(dim, int(dim * mlp_ratio), conv_groups, shallow=shallow)

    def forward(self, x: flow.Tensor, grid: Grid) -> flow.Tensor:  # type: ignore[override]
        """x (N, tokens, dim) to the same; `grid` is (rows, columns) of the tokens' map."""
        on_map = x[:, 1:] if self.class_token else x
        local = self.drop_path_local(map_to_tokens(self.PCM(tokens_to_map(on_map, grid))))
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        x = flow.cat([x[:, :1], x[:, 1:] + local], dim=1) if self.class_token else x + local
        return x + self.drop_path2(self.mlp(self.norm2(x)))


@bfloat16_container
class PyramidReduction(nn.Module):
    """Maps (N, H, W, in_chans) to tokens (N, H' W', len(dilations) width).

    A convolution with a bias for each dilation, side by side in the tokens, the first dilation
    first; then an exact GELU. The padding ceil(((kernel - 1) dilation + 1 - stride) / 2) gives all
    of them one size, `stride` times smaller each way.
    """

    def __init__(
        self, in_chans: int, width: int, kernel: int, stride: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        self.width = width * len(dilations)
        self.convs = nn.ModuleList(
            [
                nn.Sequential(
                    MapConv2d(
                        in_chans,
                        width,
                        kernel,
                        stride,
                        padding=_padding(kernel, stride, dilation),
                        dilation=dilation,
                    )
                )
                for dilation in dilations
            ]
        )
        # One serves all; published models have one in each Sequential, but it has no parameters.
        self.act = nn.GELU()

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.act(map_to_tokens(flow.cat([conv(x) for conv in self.convs], dim=-1)))


@bfloat16_container
class EmbeddingCell(nn.Module):
    """A pyramid reduction `PRM` alone: the cell that ViTAE calls "performer_less"."""

    def __init__(
        self, in_chans: int, width: int, kernel: int, stride: int, dilations: Sequence[int]
    ) -> None:
        super().__init__()
        self.PRM = PyramidReduction(in_chans, width, kernel, stride, dilations)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.PRM(x)


@bfloat16_container
class ReductionCell(nn.Module):
    """y = attention(norm1(PRM(x))) + PCM(x), then y + mlp(norm2(y)): maps (N, H, W, in_chans) to
    tokens (N, H' W', out_dim).

    `PRM` is a pyramid reduction, `PCM` the convolutions beside it, `width` channels wide inside. A
    performer, `attn`, is attention and MLP; its dropout of 0.1 is fixed.
    """

    def __init__(
        self,
        in_chans: int,
        width: int,
        out_dim: int,
        kernel: int,
        stride: int,
        dilations: Sequence[int],
    ) -> None:
        super().__init__()
        self.PCM = ReductionBranch(in_chans, width, out_dim, stride)
        self.PRM = PyramidReduction(in_chans, width, kernel, stride, dilations)
        self.attn = TokenPerformer(self.PRM.width, out_dim)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.attn(self.PRM(x), map_to_tokens(self.PCM(x)))


def reduced_grid(grid: Grid, kernel: int, stride: int) -> Grid:
    """The size of the map that a reduction cell makes of one of (rows, columns).

    With an odd kernel and an even stride it does not depend on the dilation. Raises UserError where
    nothing is left, or PCM and PRM give different sizes: with a stride of 4 a side must be a
    multiple of 4 or one less.
    """
    reduced = convolved(grid, kernel, stride, _padding(kernel, stride, 1))
    beside = grid
    for step in reduction_strides(stride):
        beside = convolved(beside, 3, step, 1)
    if min(reduced) < 1 or beside != reduced:
        raise UserError(
            f"images or maps of {grid[0]} x {grid[1]} cannot be reduced {stride} times each way: "
            f"choose a multiple of {stride} for both sides"
        )
    return reduced


def _padding(kernel: int, stride: int, dilation: int) -> int:
    return -(-((kernel - 1) * dilation + 1 - stride) // 2)


@bfloat16_container
class Stage(nn.Module):
    """A reduction cell `RC`, then any number of normal cells `NC`."""

    def __init__(self, reduction: nn.Module, cells: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.RC = reduction
        self.NC = nn.ModuleList(cells)

    def forward(self, x: flow.Tensor, grid: Grid) -> flow.Tensor:
        """x, which the reduction takes, to tokens (N, tokens, dim) of a map of this `grid`."""
        x = self.RC(x)
        for cell in self.NC:
            x = cell(x, grid)
        return x


@bfloat16_container
class ViTAE(Classifier):
    """Images (N, in_chans, H, W), float32, to scores (N, num_classes).

    Two reduction cells with performers, one without, normal cells, the mean over the tokens and a
    linear head; there are no class token, position embedding or norm at the end. A map becomes 16
    times smaller each way. Whatever `img_size` is, images may have any size whose sides are
    multiples of 4, or one less.

    Parameters and buffers in this order: `layers.0.RC`, `layers.1.RC`, `layers.2.RC`,
    `layers.2.NC.0` ... , `head`. In a reduction cell PCM, PRM, attn; in a normal cell norm1, attn,
    norm2, mlp, PCM. Names and order are those of the published checkpoints.

    Arguments and errors are those of `Classifier`, except:

    Args:
        embed_dims: channels that each dilation gives, for the three reduction cells.
        token_dims: width of the tokens that each gives; the third's is twice its `embed_dims`.
        mlp_ratio: hidden width of the normal cells' MLPs and convolutions over that of their
            tokens.
        drop_rate: dropout in the MLPs and after MLP and attention; performers always have 0.1.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dims: Sequence[int] = (64, 64, 128),
        token_dims: Sequence[int] = (64, 64, 256),
        depth: int = 7,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        conv_groups: int = 64,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: MlpLike = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        embeds, tokens = _widths("embed_dims", embed_dims), _widths("token_dims", token_dims)
        if tokens[2] != len(REDUCTIONS[2][2]) * embeds[2]:
            raise UserError(
                f"the third of token_dims={tokens} must be twice the third of embed_dims={embeds}"
            )
        super().__init__(img_size, in_chans, num_classes, tokens[2])
        self.grids(self.img_size)
        cells = [
            NormalCell(
                tokens[2],
                num_heads,
                mlp_ratio,
                conv_groups,
                drop=drop_rate,
                attn_drop=attn_drop_rate,
                drop_path_rate=rate,
                mlp_cfg=mlp_cfg,
                attnlinear_cfg=attnlinear_cfg,
            )
            for rate in drop_path_rates(drop_path_rate, depth)
        ]
        first, second, third = REDUCTIONS
        self.layers = nn.ModuleList(
            [
                Stage(ReductionCell(in_chans, embeds[0], tokens[0], *first)),
                Stage(ReductionCell(tokens[0], embeds[1], tokens[1], *second)),
                Stage(EmbeddingCell(tokens[1], embeds[2], *third), cells),
            ]
        )
        self.pool = TokenMean()
        self.head = nn.Linear(tokens[2], num_classes)
        init_transformer(self)

    def grids(self, size: Grid) -> list[Grid]:
        """(rows, columns) of the tokens after each stage, for images of (height, width). Raises
        UserError for a size that does not go through the reduction cells."""
        grids = []
        for kernel, stride, _ in REDUCTIONS:
            size = reduced_grid(size, kernel, stride)
            grids.append(size)
        return grids

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The mean of the last cell's tokens, (N, num_features).

        Raises ValueError for another number of channels, UserError for images that are too small or
        with a side that is neither a multiple of 4 nor one less.
        """
        size = tuple(images.shape[2:])
        check_images(images, self.in_chans, size)
        grids = self.grids(size)
        # Make it contiguous once, as five convolutions read it.
        x = channels_last(images).contiguous()
        for index, stage in enumerate(self.layers):
            x = stage(tokens_to_map(x, grids[index - 1]) if index else x, grids[index])
        return self.pool(x)


def _widths(name: str, values: Sequence[int]) -> tuple[int, int, int]:
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != 3:
        raise UserError(f"{name} is {values!r}: give three widths, one for each reduction cell")
    first, second, third = (check_positive(f"each of {name}", value, least=2) for value in values)
    return first, second, third


@bfloat16_container
class PatchCell(nn.Module):
    """Images (N, in_chans, *img_size) to tokens (N, 1 + patches, dim): a patch embedding `PRM`, a
    class token before its tokens, and a learned position embedding on all of them."""

    def __init__(self, img_size: Size, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.PRM = PatchEmbed(img_size, patch_size, in_chans, dim)
        self.pos_embed = nn.Parameter(flow.zeros(1, 1 + self.PRM.num_patches, dim))
        self.cls_token = nn.Parameter(flow.zeros(1, 1, dim))

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        return prepend_token(self.cls_token, self.PRM(images)) + self.pos_embed


@bfloat16_container
class PatchViTAE(Classifier):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    Patches become tokens behind a class token; then normal cells with shallow convolutions, the
    mean over the patches' tokens, a layer norm and a linear head. The class token takes part in
    attention only.

    Parameters and buffers in this order: `fc_norm`, `layers.0.RC` (pos_embed, cls_token, PRM.proj),
    `layers.2.NC.0` ... , `head`; in a cell norm1, attn, norm2, mlp, PCM. Names and order are those
    of the published checkpoints, which count three stages.

    Arguments and errors are those of `Classifier`; `mlp_ratio` holds for the cells' convolutions
    too, and `drop_rate` does not drop after the position embedding.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        conv_groups: int = 192,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mlp_cfg: MlpLike = None,
        attnlinear_cfg: LinearLike = None,
    ) -> None:
        super().__init__(img_size, in_chans, num_classes, embed_dim)
        reduction = PatchCell(img_size, patch_size, in_chans, embed_dim)
        height, width = self.img_size
        self.grid = (height // patch_size, width // patch_size)
        # It is made before the cells, as in the published checkpoints.
        self.fc_norm = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        cells = [
            NormalCell(
                embed_dim,
                num_heads,
                mlp_ratio,
                conv_groups,
                shallow=True,
                class_token=True,
                drop=drop_rate,
                attn_drop=attn_drop_rate,
                drop_path_rate=rate,
                mlp_cfg=mlp_cfg,
                attnlinear_cfg=attnlinear_cfg,
            )
            for rate in drop_path_rates(drop_path_rate, depth)
        ]
        self.layers = nn.ModuleList(
            [Stage(reduction), Stage(nn.Identity()), Stage(nn.Identity(), cells)]
        )
        self.pool = TokenMean()
        self.head = nn.Linear(embed_dim, num_classes)
        init_transformer(self)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The normalized mean of patch tokens, (N, embed_dim); ValueError for another image
        shape."""
        x = images
        for stage in self.layers:
            x = stage(x, self.grid)
        return self.fc_norm(self.pool(x[:, 1:]))
