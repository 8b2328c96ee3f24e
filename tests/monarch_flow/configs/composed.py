"""Composed configs, for tests to read."""

from __future__ import annotations

import functools
import os

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
    """For reading: the same one is returned again, as composing takes a third of a second."""
    environment = tuple(os.environ.get(name) for name in ("WORLD_SIZE", "DATA_DIR", "RESULT_DIR"))
    words = (f"experiment={experiment}", *NEEDS.get(experiment, []), *overrides)
    return _composed_once(environment, words)


@functools.cache
def _composed_once(environment, words):
    return compose(words)


def plain(cfg, key):
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
