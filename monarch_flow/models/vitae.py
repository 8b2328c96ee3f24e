"""ViTAE, a vision transformer with convolutions beside its attention (Xu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import LinearLike
from monarch_flow.layers.targets import check_positive
from monarch_flow.models.blocks import Size, TokenMean, check_images, drop_path_rates
from monarch_flow.models.classifier import Classifier
from monarch_flow.models.initialization import init_transformer
from monarch_flow.models.maps import Grid, channels_last, tokens_to_map
from monarch_flow.models.normal_cell import NormalCell
from monarch_flow.models.reduction_cell import EmbeddingCell, ReductionCell, reduced_grid

# (kernel, stride, dilations) of the three reduction cells.
REDUCTIONS = ((7, 4, (1, 2, 3, 4)), (3, 2, (1, 2, 3)), (3, 2, (1, 2)))


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
        mlp_cfg: Mapping[str, Any] | None = None,
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
