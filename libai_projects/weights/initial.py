"""The weights that a training begins with: one seed is one model, in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flow_train.rng import named_generator
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.table import Shapes, State, Table

_END_OF_A_BLOCK = (".self_attention.dense.weight", ".mlp.dense_4h_to_h.weight")


def initial_weights(
    config: Mapping[str, Any], seed: int, table: Table = GPT2
) -> Iterator[tuple[str, np.ndarray]]:
    """Each weight of `cfg.model.cfg`, by LiBai 0.1.1's name; float32; `seed` is at least 0.

    Normal with `initializer_range`, those that end a block divided by sqrt(2 x layers) unless
    `use_scaled_init_for_output_weights` is false, block-diagonal ones times sqrt(blocks), which
    keeps the output's variance; Monarch layers as monarch_flow draws them; biases 0, norms 1. Each
    depends on the seed and its name alone: more rows of the vocabulary leave those before as they
    are.
    """
    shapes = table.shapes(config)
    for name, shape in shapes.items():
        yield name, _draw(name, shapes, config, named_generator(seed, name)).reshape(shape)


def random_weights(config: Mapping[str, Any], seed: int) -> State:
    return dict(initial_weights(config, seed))


def _draw(
    name: str, shapes: Shapes, config: Mapping[str, Any], generator: np.random.Generator
) -> np.ndarray:
    shape = shapes[name]
    module, _, kind = name.rpartition(".")
    factored = f"{module}.blkdiag1" in shapes
    if factored:
        # Kaiming's uniform rule, as monarch_flow.layers has it.
        bound = np.float32(1 / math.sqrt(shape[0] if kind == "bias" else shape[-1]))
        return bound * (2 * generator.random(shape, np.float32) - 1)
    if kind == "bias":
        return np.zeros(shape, np.float32)
    if "layernorm" in module:
        return np.ones(shape, np.float32)
    std = config.get("initializer_range", 0.02)
    if name.endswith(_END_OF_A_BLOCK) and config.get("use_scaled_init_for_output_weights", True):
        std /= math.sqrt(2 * config["num_layers"])
    if len(shape) == 3:
        std *= math.sqrt(shape[0])
    return generator.standard_normal(shape, np.float32) * np.float32(std)
