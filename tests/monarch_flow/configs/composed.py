"""Composed configs, for tests to read."""

from __future__ import annotations

from omegaconf import OmegaConf

from monarch_flow.config import compose

# Experiments that need a key besides.
NEEDS = {
    "mnist/vit-monarch-d2s": ["train.init_from.path=there"],
    "flowers5/vit-monarch-d2s": ["train.init_from.path=there"],
    "mnist/vitae-tiny-d2s": ["train.init_from.path=there"],
    "flowers5/vitae-tiny-d2s": ["train.init_from.path=there"],
    "imagenet/vitae/tiny-d2s": ["train.init_from.path=there"],
    "imagenet/vitae/small-d2s": ["train.init_from.path=there"],
}
MONARCH = {
    "_target_": "monarch_flow.layers.MlpCustom",
    "linear1_cfg": {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4},
    "linear2_cfg": {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4},
}


def composed(experiment, *overrides):
    return compose([f"experiment={experiment}", *NEEDS.get(experiment, []), *overrides])


def plain(cfg, key):
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
