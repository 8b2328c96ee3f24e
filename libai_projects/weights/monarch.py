"""Which linear layers of a block are Monarch layers, by the model's config or by its weights; and
those layers multiplied out, for formats that have dense ones only.

`mlp_cfg` stands for both layers of the feed-forward network, or has one config for each;
`attnlinear_cfg` for the projections to queries, keys and values, which then are three layers as in
the vision models of monarch_flow; `attnproj_cfg` for attention's output projection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from omegaconf import DictConfig, OmegaConf

from monarch_flow.layers import LinearConfig, MonarchLinear, monarch_shapes
from monarch_flow.projection import monarch_to_dense

MLP, ATTENTION, PROJECTION = "mlp_cfg", "attnlinear_cfg", "attnproj_cfg"
KEYS = (MLP, ATTENTION, PROJECTION)
INNER, OUTER = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
QKV, DENSE = "self_attention.query_key_value", "self_attention.dense"
QKV_PARTS = ("q_proj", "k_proj", "v_proj")
"""The three layers that are in `QKV` where it is not one dense layer."""

_FACTOR = re.compile(rf"(.+?)\.(?:({'|'.join(QKV_PARTS)})\.)?blkdiag1\Z")
_TARGET = "_target_"
_PAIR = "monarch_flow.layers.MlpCustom"
_PAIR_KEYS = ("linear1_cfg", "linear2_cfg")


def layers(config: Mapping[str, Any]) -> dict[str, LinearConfig]:
    """The parts of a block that are Monarch layers: INNER, OUTER, QKV and DENSE of `cfg.model.cfg`.
    A UserError where a value is not the config of a linear layer that GPT-2 has."""
    inner, outer = _pair(config.get(MLP))
    found = {
        INNER: _read(MLP, inner),
        OUTER: _read(MLP, outer),
        QKV: _read(ATTENTION, config.get(ATTENTION)),
        DENSE: _read(PROJECTION, config.get(PROJECTION)),
    }
    return {part: layer for part, layer in found.items() if layer is not None}


def nblocks(layer: LinearConfig) -> int:
    """Blocks of a Monarch layer of `layers`."""
    return int(dict(layer.options)["nblocks"])


def parameter_shapes(
    part: str, in_features: int, out_features: int, layer: LinearConfig
) -> dict[str, tuple[int, ...]]:
    """Names below a part of `layers` and shapes, in the order of the state dict; features are those
    of the dense layer in its place, QKV's of three layers together."""
    names = [f"{name}." for name in QKV_PARTS] if part == QKV else [""]
    width = out_features // len(names)
    first, second = monarch_shapes(in_features, width, nblocks(layer))
    kinds = {"bias": (width,), "blkdiag1": first, "blkdiag2": second}
    return {f"{name}{kind}": shape for name in names for kind, shape in kinds.items()}


def settings_of(state: Mapping[str, np.ndarray], block: str) -> dict[str, Any]:
    """The keys of `cfg.model.cfg` that weights tell; `block` is a prefix that ends with a dot."""
    found = {
        part: _of_blocks(state.get(f"{block}{part}.{below}blkdiag1"))
        for part, below in ((INNER, ""), (OUTER, ""), (QKV, f"{QKV_PARTS[0]}."), (DENSE, ""))
    }
    inner, outer = found[INNER], found[OUTER]
    pair = {_TARGET: _PAIR, **dict(zip(_PAIR_KEYS, (inner, outer), strict=True))}
    settings = {
        MLP: inner if inner == outer else pair,
        ATTENTION: found[QKV],
        PROJECTION: found[DENSE],
    }
    return {key: value for key, value in settings.items() if value is not None}


def _of_blocks(blkdiag1: np.ndarray | None) -> dict[str, Any] | None:
    if blkdiag1 is None:
        return None
    layer = LinearConfig.of({_TARGET: "monarch", "nblocks": len(blkdiag1)})
    return layer.to_dict()


def _pair(value: Any) -> tuple[Any, Any]:
    """The configs of both layers of the feed-forward network."""
    value = _plain(value)
    target = value.get(_TARGET) if isinstance(value, Mapping) else None
    if not isinstance(target, str) or target.rpartition(".")[2] != _PAIR.rpartition(".")[2]:
        return value, value
    unknown = [key for key in value if key not in (_TARGET, "drop_btw_fcs", *_PAIR_KEYS)]
    if unknown or value.get("drop_btw_fcs"):
        what = unknown[0] if unknown else "drop_btw_fcs=true"
        raise UserError(
            f"model.cfg.{MLP}.{what}: GPT-2's feed-forward network takes {', '.join(_PAIR_KEYS)}; "
            "its dropout is model.cfg.output_dropout_prob"
        )
    first, second = (value.get(key) for key in _PAIR_KEYS)
    return first, second


def _read(key: str, value: Any) -> LinearConfig | None:
    """The layer of a config, None for a dense one."""
    try:
        layer = LinearConfig.of(_plain(value))
    except UserError as error:
        raise UserError(f"model.cfg.{key}: {error}") from error
    if layer.is_dense:
        return None
    if layer.target != MonarchLinear.__name__:
        raise UserError(
            f"model.cfg.{key}: GPT-2 has dense and Monarch layers, not {layer.target}; the others "
            "are for the vision models of monarch_flow. Give null or 'monarch'"
        )
    if dict(layer.options).get("bias", True) is not True:
        raise UserError(f"model.cfg.{key}.bias: the linear layers of GPT-2 have biases")
    if type(dict(layer.options)["nblocks"]) is not int or nblocks(layer) < 1:
        raise UserError(
            f"model.cfg.{key}.nblocks={dict(layer.options)['nblocks']!r}: a whole number from 1 on"
        )
    return layer


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, DictConfig) else value


def densified(state: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The same function with dense layers only: LiBai 0.1.1's state with weights (in, out) in place
    of factors. `config` gives hidden_size, ffn_hidden_size and num_attention_heads."""
    layers = dict.fromkeys(found[1] for found in map(_FACTOR.match, state) if found)
    below = tuple(f"{layer}." for layer in layers)
    result = {name: array for name, array in state.items() if not name.startswith(below)}
    for layer in layers:
        inputs = config["ffn_hidden_size" if layer.endswith(OUTER) else "hidden_size"]
        names = [f"{layer}.{part}" for part in QKV_PARTS] if layer.endswith(QKV) else [layer]
        weights = [_weight(state, name, inputs) for name in names]
        biases = [state[f"{name}.bias"] for name in names]
        if layer.endswith(QKV):
            weights = [_interleaved(weights, config["num_attention_heads"])]
            biases = [_interleaved(biases, config["num_attention_heads"])]
        result[f"{layer}.weight"], result[f"{layer}.bias"] = weights[0], biases[0]
    return result


def _weight(state: Mapping[str, np.ndarray], name: str, inputs: int) -> np.ndarray:
    """The dense weight, (in, out)."""
    first, second = state[f"{name}.blkdiag1"], state[f"{name}.blkdiag2"]
    outputs = len(state[f"{name}.bias"])
    return np.ascontiguousarray(monarch_to_dense(first, second, outputs, inputs).T)


def _interleaved(parts: list[np.ndarray], heads: int) -> np.ndarray:
    """Three arrays with a last axis (heads, head size) as one of (heads, 3, head size)."""
    split = [part.reshape(*part.shape[:-1], heads, -1) for part in parts]
    return np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], -1)
