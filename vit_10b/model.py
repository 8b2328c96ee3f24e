"""The vision transformer of `run_vit_training.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import (
    LinearConfig,
    dropout,
    mlp_options,
    parameter_shapes,
    replace_linears,
)
from monarch_flow.models.blocks import (
    Block,
    Classifier,
    PatchEmbed,
    TokenMean,
    init_transformer,
    small_normal_,
)

# Of the blocks' layer norms and of the last one: they differ in the published model.
BLOCK_EPS, LAST_EPS = 1e-5, 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, by the names of the command's options. The last three make structured
    layers, of the MLPs, of queries, keys and values, and after attention: dense, Monarch or
    block-diagonal ones."""

    image_size: int = 224
    patch_size: int = 14
    embed_dim: int = 5120
    num_heads: int = 32
    num_blocks: int = 32
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    mlp_cfg: Any = None
    attnlinear_cfg: Any = None
    attnproj_cfg: Any = None

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def hidden(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def name(self) -> str:
        """What a checkpoint calls the model."""
        structured = "".join(
            f"_{name}_{config.target}{dict(config.options)['nblocks']}"
            for name, (config, *_) in self._layers.items()
            if not config.is_dense
        )
        return (
            f"vit_d{self.embed_dim}_l{self.num_blocks}_h{self.num_heads}_mlp{self.hidden}"
            f"_p{self.patch_size}_{self.image_size}{structured}"
        )

    @property
    def _layers(self) -> dict[str, tuple[LinearConfig, int, int]]:
        """The linear layers of a block and their widths."""
        dim, hidden, mlp = self.embed_dim, self.hidden, mlp_options(self.mlp_cfg)
        layers = {"qkv": (self.attnlinear_cfg, dim, 3 * dim)}
        if self.attnlinear_cfg is not None:
            layers = dict.fromkeys(("q", "k", "v"), (self.attnlinear_cfg, dim, dim))
        layers["proj"] = self.attnproj_cfg, dim, dim
        layers |= {
            "fc1": (mlp["linear1_cfg"], dim, hidden),
            "fc2": (mlp["linear2_cfg"], hidden, dim),
        }
        return {name: (LinearConfig.of(cfg), *sizes) for name, (cfg, *sizes) in layers.items()}

    @property
    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter of a block: weights and biases of its layers, and of two norms. Raises
        UserError for a layer that may not be there."""
        shapes = {name: parameter_shapes(*layer) for name, layer in self._layers.items()}
        shapes |= dict.fromkeys(
            ("norm1", "norm2"), dict.fromkeys(("weight", "bias"), (self.embed_dim,))
        )
        return {
            f"{name}.{kind}": shape for name, own in shapes.items() for kind, shape in own.items()
        }

    @property
    def block_sizes(self) -> list[int]:
        """Numbers of each parameter of a block."""
        return list(map(math.prod, self.block_shapes.values()))

    @property
    def root_sizes(self) -> list[int]:
        """The same outside the blocks: patch and position embedding, last norm, head."""
        dim, classes = self.embed_dim, self.num_classes
        patches = 3 * self.patch_size**2 * dim
        return [patches, dim, self.tokens * dim, dim, dim, classes * dim, classes]

    @property
    def block_parameters(self) -> int:
        return sum(self.block_sizes)

    @property
    def root_parameters(self) -> int:
        return sum(self.root_sizes)

    @property
    def parameters(self) -> int:
        return self.num_blocks * self.block_parameters + self.root_parameters


class ViT(Classifier):
    """Images (N, 3, image_size, image_size), float32, to scores (N, num_classes).

    Patches become tokens, a learned position embedding is added; then pre-norm blocks, a layer
    norm, the mean over the tokens and a linear head; there is no class token. Linear layers and the
    convolution start as OneFlow's constructors draw them, as in the published model, or with
    `timm_init` as timm means to.

    Args:
        dropouts: after the position embedding, of the attention weights, in the MLPs and after
            attention's projection.
        made: called with name and module of each block as soon as it has its first weights; it may
            cut it over the processes, so that none holds two whole ones.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dropouts: tuple[float, float, float] = (0.0, 0.0, 0.0),
        timm_init: bool = False,
        made: Callable[[str, nn.Module], None] = lambda name, block: None,
    ) -> None:
        dim = shape.embed_dim
        super().__init__(shape.image_size, 3, shape.num_classes, dim)
        position, attention, mlp = dropouts
        self.patch_embed = PatchEmbed(shape.image_size, shape.patch_size, 3, dim)
        self.pos_embed = nn.Parameter(flow.zeros(1, shape.tokens, dim))
        small_normal_(self.pos_embed)
        self.pos_drop = dropout(position)
        self.blocks = nn.Sequential()
        for index in range(shape.num_blocks):
            block = Block(
                dim,
                shape.num_heads,
                shape.mlp_ratio,
                qkv_bias=True,
                drop=mlp,
                attn_drop=attention,
                drop_path_rate=0.0,
                norm_eps=BLOCK_EPS,
                mlp_cfg=shape.mlp_cfg,
                attnlinear_cfg=shape.attnlinear_cfg,
            )
            if shape.attnproj_cfg is not None:
                replace_linears(block, shape.attnproj_cfg, include=r"attn\.proj$")
            if timm_init:
                init_transformer(block)
            made(f"blocks.{index}", block)
            self.blocks.add_module(str(index), block)
        self.norm = nn.LayerNorm(dim, eps=LAST_EPS)
        self.mean = TokenMean()
        self.head = nn.Linear(dim, shape.num_classes)
        if timm_init:
            init_transformer(self.head)

    def features(self, images: flow.Tensor) -> flow.Tensor:
        """The mean of the normalized tokens, (N, embed_dim)."""
        x = self.pos_drop(self.patch_embed(images) + self.pos_embed)
        return self.mean(self.norm(self.blocks(x)))
