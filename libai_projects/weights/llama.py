"""Llama's weights and settings in Hugging Face's files, Meta's and LiBai's; see `table`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from flow_train.checkpoint.weights import read_weights
from libai_projects.models.llama.rotary import ORIGINAL, Rotary
from libai_projects.weights.monarch import DENSE, INNER, OUTER, QKV
from libai_projects.weights.table import TIED, Config, Part, Setting, State, Table, as_float32

META_SETTINGS = "params.json"


def _sizes(config: Mapping[str, Any]) -> Config:
    """Settings with the widths of all heads together."""
    heads = config["num_attention_heads"]
    size = config.get("head_size") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return {**config, "query_size": heads * size, "key_value_size": kv_heads * size}


def _read_rotary(content: Mapping[str, Any], config: Config, where: Path) -> Config:
    """Base and scaling of the angles: transformers 5 has both in rope_parameters."""
    found = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})}
    theta = found.pop("rope_theta", content.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise UserError(f"{where}: rope_theta is {theta!r}; expected a number above 0")
    size = config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]
    try:
        rotary = Rotary.of(size, theta, found, config["max_seq_length"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    result: Config = {"rope_theta": rotary.theta, "rope_scaling": rotary.settings()}
    if rotary.kind == "dynamic":
        # transformers' number of positions is the one before scaling.
        result["max_seq_length"] = int(rotary.factor * config["max_seq_length"])
    return result


def _write_rotary(config: Config) -> Config:
    scaling = config.get("rope_scaling")
    theta = float(config.get("rope_theta") or 10000.0)
    size = config.get("head_size") or config["hidden_size"] // config["num_attention_heads"]
    rotary = Rotary.of(size, theta, scaling, config["max_seq_length"])
    found: Config = {"rope_theta": theta, "rope_scaling": rotary.settings()}
    if rotary.kind == "dynamic":
        found["max_position_embeddings"] = found["rope_scaling"].pop(ORIGINAL)
    if config.get("rope_interleaved"):
        raise UserError(
            "rope_interleaved is true, which transformers' Llama does not have: its weights of "
            "queries and keys would have to be reordered"
        )
    return found


_ATTENTION, _MLP = "attention_bias", "mlp_bias"
_QUERY, _KEY = ("hidden_size", "query_size"), ("hidden_size", "key_value_size")
_INNER, _OUTER = ("hidden_size", "ffn_hidden_size"), ("ffn_hidden_size", "hidden_size")

LLAMA = Table(
    title="Llama",
    prefix="llama.",
    their_prefix="model.",
    block="layers.",
    their_block="layers.",
    before=(Part("token_embeddings", "embed_tokens", ("vocab_size", "hidden_size"), bias=False),),
    parts=(
        Part("input_layernorm", "input_layernorm", bias=False),
        Part("self_attention.q_proj", "self_attn.q_proj", _QUERY, bias=_ATTENTION, role=QKV),
        Part("self_attention.k_proj", "self_attn.k_proj", _KEY, bias=_ATTENTION, role=QKV),
        Part("self_attention.v_proj", "self_attn.v_proj", _KEY, bias=_ATTENTION, role=QKV),
        Part(
            "self_attention.o_proj", "self_attn.o_proj", _QUERY[::-1], bias=_ATTENTION, role=DENSE
        ),
        Part("post_attention_layernorm", "post_attention_layernorm", bias=False),
        Part("mlp.gate_proj", "mlp.gate_proj", _INNER, bias=_MLP, role=INNER),
        Part("mlp.up_proj", "mlp.up_proj", _INNER, bias=_MLP, role=INNER),
        Part("mlp.down_proj", "mlp.down_proj", _OUTER, bias=_MLP, role=OUTER),
    ),
    after=(
        Part("norm", "norm", bias=False),
        Part("lm_head", "lm_head", ("vocab_size", "hidden_size"), bias=False, unless=TIED),
    ),
    derived=r"(cosines|sines)_\d+",
    # Some versions keep the frequencies beside the weights.
    their_derived=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    tied=("lm_head.weight", "embed_tokens.weight"),
    model_type="llama",
    architecture="LlamaForCausalLM",
    ends_of_branches=("self_attention.o_proj", "mlp.down_proj"),
    settings=(
        Setting("num_layers", "num_hidden_layers", 32),
        Setting("hidden_size", "hidden_size", 4096),
        Setting("num_attention_heads", "num_attention_heads", 32),
        Setting(
            "num_key_value_heads",
            "num_key_value_heads",
            lambda config: config["num_attention_heads"],
        ),
        Setting(
            "head_size",
            "head_dim",
            lambda config: config["hidden_size"] // config["num_attention_heads"],
        ),
        Setting("max_seq_length", "max_position_embeddings", 2048),
        Setting("vocab_size", "vocab_size", 32000),
        Setting("ffn_hidden_size", "intermediate_size", 11008),
        Setting("attention_dropout_prob", "attention_dropout", 0.0),
        Setting("rms_norm_epsilon", "rms_norm_eps", 1e-6),
        Setting("initializer_range", "initializer_range", 0.02),
        Setting(_ATTENTION, _ATTENTION, False),
        Setting(_MLP, _MLP, False),
        Setting(TIED, TIED, False),
    ),
    activations={"silu": "silu", "swish": "silu"},
    must_be={},
    constants={"pretraining_tp": 1, "use_cache": True},
    activation_key="hidden_act",
    their_linear_is_out_in=True,
    derive=_sizes,
    read_more=_read_rotary,
    write_more=_write_rotary,
    more_keys=("rope_theta", "rope_scaling"),
    flops_of_all=True,
)

# Meta's module to Hugging Face's, and the axis along which its files of several processes cut it.
_META = {
    "tok_embeddings": ("embed_tokens", 1),
    "norm": ("norm", None),
    "output": ("lm_head", 0),
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
}


def read_meta(folder: Path) -> tuple[State, Config]:
    """A folder of Meta's: params.json and consolidated.*.pth, as weights under Hugging Face's names
    without prefix, float32, and LiBai's settings.

    Meta turns neighbouring numbers of a head by one angle, transformers and this model those half a
    head apart, so rows of queries and keys change places. In files of Z2all w2 and w3 have the
    other's place, as the shapes tell. Raises UserError for a damaged folder.
    """
    files = sorted(folder.glob("consolidated.*.pth")) + sorted(folder.glob("consolidated.*.safet*"))
    if not (folder / META_SETTINGS).is_file() or not files:
        raise UserError(
            f"{folder} is not a model of Meta's; expected {META_SETTINGS} and consolidated.00.pth"
        )
    try:
        params = json.loads((folder / META_SETTINGS).read_text(encoding="utf-8"))
        heads, layers, width = (int(params[key]) for key in ("n_heads", "n_layers", "dim"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / META_SETTINGS} does not tell n_heads, n_layers and dim: {error!r}"
        ) from error
    shards = [read_weights(file) for file in files]
    state = {}
    for name in shards[0]:
        if name == "rope.freqs":
            continue
        absent = [file for file, shard in zip(files, shards, strict=True) if name not in shard]
        if absent:
            raise UserError(f"{absent[0]} lacks {name!r}, which {files[0].name} has")
        state.update(_from_meta(name, [as_float32(shard[name]) for shard in shards], width))
    kv_heads = int(params.get("n_kv_heads") or heads)
    for name, array in state.items():
        for module, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if name.endswith(f"{module}.weight"):
                state[name] = _halves(array, count)
    tokens, gate = state.get("embed_tokens.weight"), state.get("layers.0.mlp.gate_proj.weight")
    if tokens is None or gate is None:
        raise UserError(f"{files[0]} has no tok_embeddings.weight or no layers.0.feed_forward.w1")
    positions = int(params.get("max_seq_len", 2048))
    config = {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": width // heads,
        "ffn_hidden_size": len(gate),
        "vocab_size": len(tokens),
        "vocab_size_real": len(tokens),
        "max_seq_length": positions,
        "rms_norm_epsilon": float(params.get("norm_eps", 1e-5)),
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        "rope_scaling": None,
        "initializer_range": 0.02,
        "attention_dropout_prob": 0.0,
        "attention_bias": False,
        "mlp_bias": False,
        TIED: "lm_head.weight" not in state,
        "activation": "silu",
    }
    if params.get("use_scaled_rope"):
        # Numbers of Llama 3.1, which Meta's code has and its files have not.
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        original = {"original_max_position_embeddings": 8192}
        config["rope_scaling"] = {"rope_type": "llama3", **factors, **original}
        config["max_seq_length"] = int(params.get("max_seq_len", 131072))
    return state, config


def _from_meta(name: str, parts: list[np.ndarray], width: int) -> State:
    """One weight of Meta's, whose parts lie in several files, by Hugging Face's name."""
    module, _, kind = name.rpartition(".")
    place, inner = "", module
    if module.startswith("layers."):
        _, number, inner = module.split(".", 2)
        place = f"layers.{number}."
    if inner not in _META or kind != "weight":
        raise UserError(f"{name!r} is not a weight of Meta's Llama")
    theirs, axis = _META[inner]
    rows, columns = (*parts[0].shape, 1)[:2]
    if inner in ("feed_forward.w2", "feed_forward.w3") and rows != columns:
        # w2 goes back to the width; in Z2all's files w3 does.
        down = rows == width
        theirs, axis = ("mlp.down_proj", 1) if down else ("mlp.up_proj", 0)
    if inner == "tok_embeddings" and columns == width:
        axis = 0
    if axis is None or len(parts) == 1:
        return {f"{place}{theirs}.weight": parts[0]}
    return {f"{place}{theirs}.weight": np.concatenate(parts, axis)}


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads, pairs, 2) of a weight (out, in) to (heads, 2, pairs)."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
