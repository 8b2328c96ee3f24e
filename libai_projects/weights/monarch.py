"""Which linear layers of a block are Monarch or block-diagonal layers, by the model's config or by
its weights; and those layers made dense, for formats that have dense ones only.

`mlp_cfg` stands for both layers of the feed-forward network, or has one config for each;
`attnlinear_cfg` for the projections to queries, keys and values, which then are three layers as in
the vision models of monarch_flow; `attnproj_cfg` for attention's output projection. The first layer
of a gated network is two, alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
from omegaconf import DictConfig, OmegaConf

from monarch_flow.layers import LinearConfig, parameter_shapes

MLP, ATTENTION, PROJECTION = "mlp_cfg", "attnlinear_cfg", "attnproj_cfg"
KEYS = (MLP, ATTENTION, PROJECTION)
INNER, OUTER, QKV, DENSE = "inner", "outer", "qkv", "dense"
"""What a linear layer of a block does, as the tables of weights say it of their parts."""
FUSED = "query_key_value"
QKV_PARTS = ("q_proj", "k_proj", "v_proj")
"""The three layers that are in a module `FUSED` where it is not one dense layer."""

_TARGET = "_target_"
_PAIR = "monarch_flow.layers.MlpCustom"
_PAIR_KEYS = ("linear1_cfg", "linear2_cfg")


def layers(config: Mapping[str, Any]) -> dict[str, LinearConfig]:
    """The layers of a block that are not dense: of INNER, OUTER, QKV and DENSE, by `cfg.model.cfg`.
    A UserError where a value is not the config of a linear layer that the models have."""
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


def structured_shapes(
    layer: LinearConfig, dense: Mapping[str, tuple[int, ...]], fused: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the place of a `dense` layer's, in the order of the state dict; of each
    of `fused` layers that lie side by side in that."""
    names = [""] if fused == 1 else [f"{name}." for name in QKV_PARTS]
    inputs, outputs = dense["weight"]
    kinds = parameter_shapes(layer, inputs, outputs // fused, bias="bias" in dense)
    return {f"{name}{kind}": shape for name in names for kind, shape in kinds.items()}


def settings_of(found: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """The keys of `cfg.model.cfg` by what `layer_of` has found, None for a dense layer."""
    inner, outer = found[INNER], found[OUTER]
    pair = {_TARGET: _PAIR, **dict(zip(_PAIR_KEYS, (inner, outer), strict=True))}
    settings = {
        MLP: inner if inner == outer else pair,
        ATTENTION: found[QKV],
        PROJECTION: found[DENSE],
    }
    return {key: value for key, value in settings.items() if value is not None}


def layer_of(state: Mapping[str, np.ndarray], below: str) -> dict[str, Any] | None:
    """The config of a layer by its arrays; None for a dense one. `below` is a prefix that ends with
    a dot."""
    for short, name in (("monarch", "blkdiag1"), ("blockdiag", "weight")):
        array = state.get(below + name)
        if array is not None and array.ndim == 3:
            return LinearConfig.of({_TARGET: short, "nblocks": len(array)}).to_dict()
    return None


def outputs_of(state: Mapping[str, np.ndarray], below: str, known: int | None) -> int:
    """The outputs of a structured layer; those that are `known`, if they have these arrays, where
    padding would hide them."""
    bias = state.get(f"{below}bias")
    if bias is not None:
        return len(bias)
    blocks, rows = state.get(f"{below}blkdiag2", state.get(f"{below}weight")).shape[:2]
    return known if known and -(-known // blocks) == rows else blocks * rows


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
            f"model.cfg.{MLP}.{what}: a feed-forward network takes {', '.join(_PAIR_KEYS)} here; "
            "its dropout is model.cfg.output_dropout_prob"
        )
    first, second = (value.get(key) for key in _PAIR_KEYS)
    return first, second


def _read(key: str, value: Any) -> LinearConfig | None:
    """The layer of a config, None for a dense one."""
    try:
        layer = LinearConfig.of(_plain(value))
        blocks = dict(layer.options).get("nblocks", 1)
        if type(blocks) is not int or blocks < 1:
            raise UserError(f"model.cfg.{key}.nblocks={blocks!r}: a whole number from 1 on")
        # Of any widths: for what it says of other layers.
        parameter_shapes(layer, 1, 1)
    except UserError as error:
        raise UserError(f"model.cfg.{key}: {error}") from error
    if layer.is_dense:
        return None
    if dict(layer.options).get("shuffle"):
        raise UserError(
            f"model.cfg.{key}.shuffle: block-diagonal layers do not shuffle here, as the "
            "weights alone must tell what they are"
        )
    if "bias" in dict(layer.options):
        raise UserError(
            f"model.cfg.{key}.bias: the model says whether its layers have biases; leave it out"
        )
    return layer


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if isinstance(value, DictConfig) else value


def in_libai_layout(
    arrays: Mapping[str, np.ndarray], layers: Collection[str], heads: int
) -> dict[str, np.ndarray]:
    """Arrays with the dense weights (out, in) of these layers, by module, as LiBai has them: (in,
    out), and what is in a module `FUSED` as one layer in the place of the first. What is kept per
    weight, such as a moment, changes like the weight; names may begin with its kind and a slash."""
    result: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        if module.rpartition("/")[2] not in layers:
            result[name] = array
            continue
        array = np.ascontiguousarray(array.T) if kind == "weight" else array
        whole = module.rpartition(".")[0]
        if not whole.endswith(FUSED):
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
