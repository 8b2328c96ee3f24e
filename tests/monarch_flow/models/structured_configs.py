"""Configs of the structured layers, as the published experiments name and set them."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _layer(name: str, **options: Any) -> Config:
    return {"_target_": f"monarch_flow.layers.{name}", **options}


def _sparse(pattern: str, **options: Any) -> Config:
    return _layer("BlockSparseLinear", sparsity_config=_layer(pattern, **options), backend="dense")


def _butterfly(size: int, factors: int, block: int = 1) -> Config:
    pattern = "FlatBlockButterflySparsityConfig"
    return _sparse(pattern, butterfly_size=size, n_factors=factors, block=block)


def _with_low_rank(sparse: Config, rank: int) -> Config:
    return _layer("SparseLRLinear", sparse_cfg=sparse, rank=rank)


def mlp(layer: Config) -> Config:
    return _layer("MlpCustom", linear1_cfg=layer, linear2_cfg=layer)


MONARCH = _layer("MonarchLinear", nblocks=4)
BLOCKDIAG = _layer("BlockdiagLinear", nblocks=4)
FBBFLY = _butterfly(16, 2, block=32)
FBBFLY_LR = _with_low_rank(FBBFLY, 32)
_BLOCKDIAG_GLOBAL = _sparse("BlockdiagSparsityConfig", nblocks=4, block=32, global_size=32)

# Model, MLP layer, layer of the projections to query, key and value, parameters, and billions of
# multiply-accumulates where they are known.
MODELS: dict[str, tuple[str, Config | None, Config | None, int, float | None]] = {
    "vit-s": ("vit_small_patch16_224", None, None, 48_754_408, 9.889),
    "vit-s Monarch MLP": ("vit_small_patch16_224", MONARCH, None, 29_880_040, 6.171),
    "vit-s Monarch": ("vit_small_patch16_224", MONARCH, MONARCH, 22_802_152, 4.776),
    # DeiT's table 1 has 5 and 86 million, timm 5,717,416 and 86,567,656.
    "deit-ti": ("deit_tiny_patch16_224", None, None, 5_717_416, None),
    "deit-b": ("deit_base_patch16_224", None, None, 86_567_656, None),
    "deit-s": ("deit_small_patch16_224", None, None, 22_050_664, 4.599),
    "deit-s Monarch": ("deit_small_patch16_224", MONARCH, MONARCH, 9_664_360, 2.159),
    "vit-b": ("vit_base_patch16_224", None, None, 86_567_656, 17.564),
    "vit-b Monarch MLP": ("vit_base_patch16_224", MONARCH, None, 47_639_272, 9.895),
    "vit-b Monarch": ("vit_base_patch16_224", MONARCH, MONARCH, 37_022_440, 7.803),
    "vit-b fbbfly": ("vit_base_patch16_224", FBBFLY, FBBFLY, 25_225_960, None),
    "vit-b fbbflylr": ("vit_base_patch16_224", FBBFLY_LR, FBBFLY_LR, 30_018_340, None),
    "vit-l": ("vit_large_patch16_224", None, None, 304_326_632, None),
    "mixer-s": ("mixer_s16_224", None, None, 18_528_264, 3.777),
    "mixer-s Monarch": ("mixer_s16_224", MONARCH, None, 6_993_928, 1.516),
    "mixer-b": ("mixer_b16_224", None, None, 59_880_472, 12.602),
    "mixer-b Monarch": ("mixer_b16_224", MONARCH, None, 20_952_088, 4.972),
    "mixer-b blockdiag": ("mixer_b16_224", BLOCKDIAG, None, 17_413_144, 4.278),
    "mixer-b blockdiagglobal": ("mixer_b16_224", _BLOCKDIAG_GLOBAL, None, 19_624_984, None),
    "mixer-b fbbfly": ("mixer_b16_224", FBBFLY, None, 15_053_848, None),
    "mixer-b fbbflylr of 8": (
        "mixer_b16_224",
        _with_low_rank(_butterfly(8, 2, block=32), 32),
        None,
        27_486_256,
        None,
    ),
    "t2t-7": ("t2t_vit_7", None, None, 4_255_694, None),
    "t2t-14": ("t2t_vit_14", None, None, 21_465_806, None),
    "t2t-t-14": ("t2t_vit_t_14", None, None, 21_465_422, None),
}
