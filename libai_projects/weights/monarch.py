"""Which linear layers of a block are Monarch or block-diagonal layers, by the model's config or by
its weights; and those layers made dense, for formats that have dense ones only.

`mlp_cfg` stands for both layers of the feed-forward network, or has one config for each;
`attnlinear_cfg` for the projections to queries, keys and values, which then are three layers as in
the vision models of monarch_flow; `attnproj_cfg` for attention's output projection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from omegaconf import DictConfig, OmegaConf

from monarch_flow.layers import BlockdiagLinear, LinearConfig, MonarchLinear, monarch_shapes
from monarch_flow.projection import LayerSpec, densify_weights

MLP, ATTENTION, PROJECTION = "mlp_cfg", "attnlinear_cfg", "attnproj_cfg"
KEYS = (MLP, ATTENTION, PROJECTION)
INNER, OUTER = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
QKV, DENSE = "self_attention.query_key_value", "self_attention.dense"
QKV_PARTS = ("q_proj", "k_proj", "v_proj")
"""The three layers that are in `QKV` where it is not one dense layer."""

_TARGET = "_target_"
_PAIR = "monarch_flow.layers.MlpCustom"
_PAIR_KEYS = ("linear1_cfg", "linear2_cfg")


def layers(config: Mapping[str, Any]) -> dict[str, LinearConfig]:
    """The parts of a block that are not dense: of INNER, OUTER, QKV and DENSE, by `cfg.model.cfg`.
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
    """Blocks of a layer of `layers`."""
    return int(dict(layer.options)["nblocks"])


def parameter_shapes(
    part: str, in_features: int, out_features: int, layer: LinearConfig
) -> dict[str, tuple[int, ...]]:
    """Names below a part of `layers` and shapes, in the order of the state dict; features are those
    of the dense layer in its place, QKV's of three layers together."""
    names = [f"{name}." for name in QKV_PARTS] if part == QKV else [""]
    width = out_features // len(names)
    blocks = nblocks(layer)
    kinds: dict[str, tuple[int, ...]] = {"bias": (width,)}
    if layer.target == MonarchLinear.__name__:
        kinds["blkdiag1"], kinds["blkdiag2"] = monarch_shapes(in_features, width, blocks)
    else:
        kinds["weight"] = blocks, -(-width // blocks), -(-in_features // blocks)
    return {f"{name}{kind}": shape for name in names for kind, shape in kinds.items()}


def settings_of(state: Mapping[str, np.ndarray], block: str) -> dict[str, Any]:
    """The keys of `cfg.model.cfg` that weights tell; `block` is a prefix that ends with a dot."""
    found = {
        part: _of_arrays(state, f"{block}{part}.{below}")
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


def _of_arrays(state: Mapping[str, np.ndarray], below: str) -> dict[str, Any] | None:
    """The config of a layer by its arrays; None for a dense one."""
    for short, name in (("monarch", "blkdiag1"), ("blockdiag", "weight")):
        array = state.get(below + name)
        if array is not None and array.ndim == 3:
            return LinearConfig.of({_TARGET: short, "nblocks": len(array)}).to_dict()
    return None


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
    if layer.target not in (MonarchLinear.__name__, BlockdiagLinear.__name__):
        raise UserError(
            f"model.cfg.{key}: GPT-2 has dense, Monarch and block-diagonal layers, not "
            f"{layer.target}; the others are for the vision models of monarch_flow. Give null, "
            "'monarch' or 'blockdiag'"
        )
    if dict(layer.options).get("shuffle"):
        raise UserError(
            f"model.cfg.{key}.shuffle: GPT-2's block-diagonal layers do not shuffle, as the "
            "weights alone must tell what they are"
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
    """The same function with dense layers only, in LiBai 0.1.1's layout. `config` gives
    hidden_size, ffn_hidden_size and num_attention_heads."""
    layers = {}
    for name, array in state.items():
        module, _, kind = name.rpartition(".")
        if array.ndim == 3 and kind in ("blkdiag1", "weight"):
            inputs = config["ffn_hidden_size" if module.endswith(OUTER) else "hidden_size"]
            of = "monarch" if kind == "blkdiag1" else "blockdiag"
            layers[module] = LayerSpec(of, inputs, len(state[f"{module}.bias"]), len(array))
    dense, _ = densify_weights(state, layers)
    return in_libai_layout(dense, layers, config["num_attention_heads"])


def in_libai_layout(
    arrays: Mapping[str, np.ndarray], layers: Collection[str], heads: int
) -> dict[str, np.ndarray]:
    """Arrays with the dense weights (out, in) of these layers, by module, as LiBai has them: (in,
    out), and queries, keys and values as one layer in the place of the first. What is kept per
    weight, such as a moment, changes like the weight; names may begin with its kind and a slash."""
    result: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        if module.rpartition("/")[2] not in layers:
            result[name] = array
            continue
        array = np.ascontiguousarray(array.T) if kind == "weight" else array
        whole, _, part = module.rpartition(".")
        if part not in QKV_PARTS:
            result[name] = array
            continue
        # The three are in the order of QKV_PARTS, as in the model.
        found = parts.setdefault(f"{whole}.{kind}", [])
        found.append(array)
        if len(found) == len(QKV_PARTS):
            result[f"{whole}.{kind}"] = _interleaved(found, heads)
    return result


def _interleaved(parts: list[np.ndarray], heads: int) -> np.ndarray:
    """Three arrays with a last axis (heads, head size) as one of (heads, 3, head size)."""
    split = [part.reshape(*part.shape[:-1], heads, -1) for part in parts]
    return np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], -1)
