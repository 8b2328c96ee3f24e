"""What the models have in common: tokens and maps, the patch embedding, the pre-norm transformer
block, the classifier around them, and how weights start.

Tokens (N, H W, C) are the places of a map row by row: token W r + c is the place in row r and
column c. A map (N, H, W, C) is the same memory as its tokens, so nothing is copied between
attention and convolutions. Images, and maps for OneFlow's own operators, are (N, C, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.layers import DropPath, LinearLike, MlpLike, StructuredLinear, build_mlp
from monarch_flow.models.attention import Attention

# (rows, columns) of a map.
Grid = tuple[int, int]
# Of an image; one number for a square.
Size = int | Sequence[int]
Rule = Callable[[flow.Tensor], object]


def tokens_to_map(x: flow.Tensor, grid: Grid) -> flow.Tensor:
    """(N, H W, C) to (N, H, W, C)."""
    return x.reshape(x.shape[0], *grid, x.shape[2])


def map_to_tokens(x: flow.Tensor) -> flow.Tensor:
    """(N, H, W, C) to (N, H W, C)."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])


def channels_last(x: flow.Tensor) -> flow.Tensor:
    """(N, C, H, W) to a map (N, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def convolved(size: Grid, kernel: int, stride: int, padding: int) -> Grid:
    """The size of the map that a convolution makes of one of `size`."""
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in size)
    return rows, columns


def image_size(size: Size) -> tuple[int, int]:
    """(height, width) of an int, for a square, or of a pair; UserError unless positive."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"img_size={size!r} is neither a positive number nor (height, width)")
    return pair[0], pair[1]


def check_images(images: flow.Tensor, in_chans: int, size: tuple[int, int]) -> None:
    """Raises ValueError where images are not (N, in_chans, *size)."""
    expected = (in_chans, *size)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images of shape {tuple(images.shape)} do not fit a model built for (N, "
            f"{', '.join(map(str, expected))}): build it with other img_size and in_chans"
        )


def drop_path(rate: float) -> nn.Module:
    return DropPath(rate) if rate else nn.Identity()


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The rate of each block, rising linearly from 0 to `rate` (Huang et al. 2016, section 3)."""
    return [float(value) for value in np.linspace(0.0, rate, depth)]


def prepend_token(token: flow.Tensor, x: flow.Tensor) -> flow.Tensor:
    """token (1, 1, dim) before those of each sample: x (N, tokens, dim) to (N, 1 + tokens, dim)."""
    first = token.expand(x.shape[0], -1, -1)
    if x.is_global:
        # Give the token the batch's layout, or concatenation gathers the batch on every rank.
        first = first.to_global(sbp=x.sbp)
    return flow.cat([first, x], dim=1)


@bfloat16_container
class PatchEmbed(nn.Module):
    """Images (N, in_chans, height, width) to tokens (N, patches, dim), row by row.

    The convolution `proj` has a weight (dim, in_chans, patch, patch), a bias and a stride of its
    size. Raises UserError where the patch does not divide the image; the forward pass raises
    ValueError for images of another shape.
    """

    def __init__(self, img_size: Size, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.img_size = image_size(img_size)
        self.in_chans = in_chans
        if patch_size < 1 or any(side % patch_size for side in self.img_size):
            raise UserError(
                f"patches of {patch_size} do not divide an image of {self.img_size}: choose "
                "img_size as a multiple of patch_size"
            )
        self.num_patches = math.prod(side // patch_size for side in self.img_size)
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size)

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        check_images(images, self.in_chans, self.img_size)
        return map_to_tokens(channels_last(self.proj(images)))


class TokenMean(nn.Module):
    """(N, tokens, dim) to (N, dim). Not a bfloat16 container, so its mean is taken in float32."""

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return x.mean(dim=1)


@bfloat16_container
class Block(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)): (N, tokens, dim) to the same, as in ViT
    (Dosovitskiy et al. 2021, equations 2 and 3).

    In training each branch of each sample is left out with probability `drop_path_rate`, the two of
    a block independently. Raises UserError where the heads do not divide the width, or a config is
    wrong.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        qkv_bias: bool,
        drop: float,
        attn_drop: float,
        drop_path_rate: float,
        norm_eps: float,
        mlp_cfg: MlpLike,
        attnlinear_cfg: LinearLike,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(
            dim,
            num_heads,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=drop,
            attnlinear_cfg=attnlinear_cfg,
        )
        # These are separate modules, though without parameters, as each call draws anew.
        self.drop_path1 = drop_path(drop_path_rate)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = build_mlp(mlp_cfg, dim, int(dim * mlp_ratio), drop=drop)
        self.drop_path2 = drop_path(drop_path_rate)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class Classifier(nn.Module):
    """Images (N, in_chans, *img_size), float32, to scores (N, num_classes).

    The models' constructors spell their arguments out with their own defaults, as configs,
    `default_config` and type checkers read them there. These mean the same in all that have them:

        img_size: height and width of an image; one number for a square.
        patch_size: side of a patch, which must divide both.
        depth: blocks, or normal cells.
        num_heads: must divide the width of a token.
        mlp_ratio: hidden width of the MLPs over that of their tokens.
        qkv_bias: whether the projections to query, key and value have a bias.
        norm_eps: epsilon of the layer norms, except in T2T-ViT's `patch_embed`.
        drop_rate: dropout after a position embedding, in the MLPs and after each branch.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0 at the first.
        mlp_cfg: layers of the MLPs, as `monarch_flow.layers.build_mlp` takes it; None for dense.
        attnlinear_cfg: layers of the projections to query, key and value, as `LinearConfig.of`
            takes it; None for one packed dense layer.

    `features` gives a width of `num_features`, and `head` makes the scores of it. Raises UserError
    where sizes do not fit each other, or a config is wrong.
    """

    head: nn.Module

    def __init__(self, img_size: Size, in_chans: int, num_classes: int, num_features: int) -> None:
        super().__init__()
        self.img_size = image_size(img_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = num_features

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """Images to what the head takes, (N, num_features)."""
        raise NotImplementedError

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        return self.head(self.features(images))


def small_normal_(tensor: flow.Tensor) -> None:
    """Fill with N(0, 0.02^2), cut off at -2 and 2."""
    nn.init.trunc_normal_(tensor, std=0.02)


def init_transformer(model: nn.Module) -> None:
    """Linear layers, the head among them: `small_normal_`, biases 0. Layer norms: 1 and 0.
    Convolutions keep what their constructor drew."""
    for module in model.modules():
        if type(module) is nn.Linear:
            _fill(module, small_normal_, nn.init.zeros_)
        elif isinstance(module, StructuredLinear):
            module.reset_dense_init(small_normal_)


def init_mixer(model: nn.Module) -> None:
    """Linear layers: Xavier's uniform rule, biases N(0, 1e-6^2) inside the MLPs and 0 elsewhere.
    The head: 0. Convolutions: N(0, 1 / fan-in), biases 0. Layer norms: 1 and 0."""
    for name, module in model.named_modules():
        bias: Rule = _tiny_normal_ if "mlp" in name else nn.init.zeros_
        if name == "head":
            _fill(module, nn.init.zeros_, nn.init.zeros_)
        elif type(module) is nn.Linear:
            _fill(module, nn.init.xavier_uniform_, bias)
        elif isinstance(module, StructuredLinear):
            module.reset_dense_init(nn.init.xavier_uniform_, bias)
        elif isinstance(module, nn.Conv2d):
            _fill(module, _lecun_normal_, nn.init.zeros_)


def _fill(module: nn.Module, weight: Rule, bias: Rule) -> None:
    with flow.no_grad():
        weight(module.weight)
        if module.bias is not None:
            bias(module.bias)


def _tiny_normal_(tensor: flow.Tensor) -> None:
    nn.init.normal_(tensor, 0.0, 1e-6)


def _lecun_normal_(tensor: flow.Tensor) -> None:
    """N(0, 1 / fan-in) (LeCun et al. 1998, section 4.6)."""
    nn.init.normal_(tensor, 0.0, 1.0 / math.sqrt(math.prod(tensor.shape[1:])))
