"""Model settings: Hugging Face's config.json, LiBai's config.yaml, and what shapes alone tell."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np
import yaml

from libai_projects.weights import monarch
from libai_projects.weights.mapping import PREFIX, TOKEN_EMBEDDING

Config = dict[str, Any]

# LiBai's key, config.json's key, and transformers' default where the file leaves it out.
_SIZES = (
    ("num_layers", "n_layer", 12),
    ("hidden_size", "n_embd", 768),
    ("num_attention_heads", "n_head", 12),
    ("max_seq_length", "n_positions", 1024),
    ("vocab_size", "vocab_size", 50257),
)
_NUMBERS = (
    ("embedding_dropout_prob", "embd_pdrop", 0.1),
    ("attention_dropout_prob", "attn_pdrop", 0.1),
    ("output_dropout_prob", "resid_pdrop", 0.1),
    ("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
    ("initializer_range", "initializer_range", 0.02),
)
MODEL_KEYS = frozenset(
    [key for key, _, _ in _SIZES + _NUMBERS]
    + ["ffn_hidden_size", "activation", "vocab_size_real", "apply_query_key_layer_scaling"]
)
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS_BACK = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
# Settings under which transformers computes something else than this model does.
_MUST_BE = {
    "tie_word_embeddings": (True, "the head must be tied to the token embedding"),
    "scale_attn_weights": (True, "attention is scaled by 1/sqrt(head size)"),
    "scale_attn_by_inverse_layer_idx": (False, "attention is not scaled by the layer's number"),
    "add_cross_attention": (False, "there is no encoder to attend to"),
}
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GPT2_VOCABULARY = 50257
# Padding of a vocabulary to a multiple, such as 128 for each of 8 tensor-parallel processes.
_MOST_PADDING = 1024


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        UserError: it is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); is the file whole?") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object with settings")
    return content


def from_huggingface(content: Mapping[str, Any], where: Path) -> Config:
    """LiBai's model settings from the content of config.json.

    Args:
        where: the file, for error texts.

    Raises:
        UserError: it describes another architecture, or a GPT-2 that this model cannot compute.
    """
    kind = content.get("model_type")
    architectures = content.get("architectures") or ["none"]
    if kind != "gpt2" and not (kind is None and str(architectures[0]).startswith("GPT2")):
        raise UserError(
            f"{where} describes a model of type {kind!r} ({architectures[0]}); only GPT-2 "
            "(model_type 'gpt2') can be converted"
        )
    activation = content.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"{where}: activation_function is {activation!r}; this model has "
            f"{', '.join(map(repr, _ACTIVATIONS))}"
        )
    for key, (needed, why) in _MUST_BE.items():
        if bool(content.get(key, needed)) != needed:
            raise UserError(f"{where}: {key} is {content[key]!r}; {why} in this model")
    config: Config = {}
    for key, name, default in _SIZES:
        config[key] = _size(content.get(name, default), name, where)
    for key, name, number in _NUMBERS:
        config[key] = _number(content.get(name, number), name, where)
    inner = content.get("n_inner")
    config["ffn_hidden_size"] = (
        4 * config["hidden_size"] if inner is None else _size(inner, "n_inner", where)
    )
    check_heads(config, where)
    config["activation"] = _ACTIVATIONS[activation]
    config["vocab_size_real"] = config["vocab_size"]
    return config


def to_huggingface(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json, keys sorted.

    Args:
        config: LiBai's model settings; vocab_size is the number of rows written.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        UserError: a setting is missing, or transformers' GPT-2 has nothing like it.
    """
    missing = [key for key, _, _ in _SIZES if config.get(key) is None]
    if missing:
        raise UserError(f"the model's settings lack {', '.join(missing)}")
    activation = config.get("activation", "gelu_tanh")
    if activation not in _ACTIVATIONS_BACK:
        raise UserError(
            f"activation is {activation!r}; expected {' or '.join(map(repr, _ACTIVATIONS_BACK))}"
        )
    if config.get("apply_residual_post_layernorm"):
        raise UserError("apply_residual_post_layernorm is true, which GPT-2 does not have")
    check_heads(config)
    inner = config.get("ffn_hidden_size")
    content: dict[str, Any] = {
        "activation_function": _ACTIVATIONS_BACK[activation],
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_inner": None if inner in (None, 4 * config["hidden_size"]) else int(inner),
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    for key, name, _ in _SIZES:
        content[name] = int(config[key])
    for key, name, default in _NUMBERS:
        content[name] = float(config.get(key, default))
    return dict(sorted(content.items()))


def generation_of(*contents: Mapping[str, Any]) -> dict[str, int]:
    """The token ids that generation needs, from generation_config.json or config.json: the first
    that names one counts."""
    return {
        key: next(content[key] for content in contents if type(content.get(key)) is int)
        for key in GENERATION_KEYS
        if any(type(content.get(key)) is int for content in contents)
    }


def from_shapes(state: Mapping[str, np.ndarray]) -> Config:
    """Sizes that the shapes in LiBai 0.1.1's layout tell, and which layers are Monarch layers; the
    number of heads is not among them.

    Raises:
        UserError: there is no token embedding or no block.
    """
    layers = [
        int(found[1])
        for found in (re.match(r"GPT_model\.transformer\.layers\.(\d+)\.", name) for name in state)
        if found
    ]
    tokens = state.get(TOKEN_EMBEDDING)
    if tokens is None or tokens.ndim != 2 or not layers:
        some = ", ".join(list(state)[:3])
        raise UserError(f"these are not the weights of LiBai's GPT-2: it holds {some} ...")
    config = {
        "num_layers": 1 + max(layers),
        "hidden_size": tokens.shape[1],
        "vocab_size": tokens.shape[0],
    }
    positions = state.get(f"{PREFIX}embeddings.position_embeddings.weight")
    if positions is not None:
        config["max_seq_length"] = len(positions)
    inner = [state[name] for name in state if name.endswith("dense_h_to_4h.bias")]
    config["ffn_hidden_size"] = len(inner[0]) if inner else 4 * config["hidden_size"]
    return {**config, **monarch.settings_of(state, f"{PREFIX}transformer.layers.0.")}


def from_libai_yaml(path: Path) -> Config:
    """The model's settings in the config.yaml that LiBai writes at the start of a run.

    Unknown tags are passed over: nothing is constructed. A run that trained with LiBai's fused
    bias_gelu, or with its own GPT model, used the erf form of GELU; else `activation` counts.

    Raises:
        UserError: the file cannot be parsed.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("cfg"), dict):
        return {}
    settings = dict(model["cfg"])
    if "hidden_layers" in settings:
        settings.setdefault("num_layers", settings["hidden_layers"])
    own_gpt = str(model.get("_target_", "")).startswith("libai.models")
    if "activation" not in settings and (settings.get("bias_gelu_fusion") or own_gpt):
        settings["activation"] = "gelu"
    return known_settings(settings)


def known_settings(settings: Mapping[str, Any]) -> Config:
    """The entries that describe the model; interpolations ("${...}") and nulls say nothing."""
    return {
        key: value
        for key, value in settings.items()
        if (key == "activation" and value in _ACTIVATIONS_BACK)
        or (key in MODEL_KEYS and isinstance(value, int | float))
    }


def real_vocabulary(rows: int, known: int | None) -> int:
    """How many of a checkpoint's vocabulary rows are tokens; the rest is padding.

    Where nothing is known, rows a little above GPT-2's 50257 are taken for that vocabulary: LiBai
    pads it to 50304 on one process and to more under tensor parallelism.
    """
    if known is not None:
        return known
    padded = GPT2_VOCABULARY < rows <= GPT2_VOCABULARY + _MOST_PADDING
    return GPT2_VOCABULARY if padded else rows


def check_heads(config: Mapping[str, Any], where: Path | None = None) -> None:
    """Refuse a number of heads that does not divide the width.

    Raises:
        UserError: it does not.
    """
    if config["hidden_size"] % config["num_attention_heads"]:
        place = f"{where}: " if where else ""
        raise UserError(
            f"{place}{config['num_attention_heads']} heads do not divide a width of "
            f"{config['hidden_size']}"
        )


class _PlainLoader(yaml.SafeLoader):
    """Reads unknown tags as None instead of refusing the file."""


_PlainLoader.add_multi_constructor("", lambda _loader, _suffix, _node: None)


def _size(value: Any, name: str, where: Path) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: {name} is {value!r}; expected a whole number above 0")
    return value


def _number(value: Any, name: str, where: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"{where}: {name} is {value!r}; expected a number of at least 0")
    return float(value)
