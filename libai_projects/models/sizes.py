"""What must hold for the numbers of `cfg.model.cfg`, whichever model they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

from libai_projects.weights import monarch
from monarch_flow.parallel import check_blocks

# Whole numbers; the value is the least that each may be.
_COUNTS = {
    "num_layers": 1,
    "vocab_size": 1,
    "vocab_size_real": 1,
    "hidden_size": 1,
    "ffn_hidden_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_size": 1,
    "max_seq_length": 1,
    "pad_token_id": 0,
}
_DROPOUT = ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob")
_NOT_NEGATIVE = ("layernorm_epsilon", "rms_norm_epsilon", "initializer_range")


def check(model: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Raise a UserError that lists every number that is out of range or that does not divide; keys
    that are null or not there are left alone."""
    found = _out_of_range(model) or _undivided(model, tensor_parallel_size)
    if found:
        raise UserError("\n  - ".join(found))


def check_vocabulary(model: Mapping[str, Any]) -> None:
    """Raise a UserError for tokens beyond the rows that the trainer or the weights have led to."""
    rows = model["vocab_size"]
    for name, most in (("vocab_size_real", rows), ("pad_token_id", rows - 1)):
        if (model.get(name) or 0) > most:
            raise UserError(
                f"model.cfg.{name}={model[name]} does not fit model.cfg.vocab_size={rows}"
            )


def _out_of_range(model: Mapping[str, Any]) -> list[str]:
    found = []
    for name, least in _COUNTS.items():
        value = model.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            found.append(f"model.cfg.{name}={value} is not a whole number")
        elif value is not None and value < least:
            found.append(f"model.cfg.{name}={value} is less than {least}")
    for name in (*_DROPOUT, *_NOT_NEGATIVE):
        value, most = model.get(name) or 0, 1 if name in _DROPOUT else float("inf")
        # Written so that nan, which compares with nothing, is out of range.
        if not 0 <= value < most:
            wanted = "in [0, 1)" if name in _DROPOUT else "a number from 0 on"
            found.append(f"model.cfg.{name}={value} is not {wanted}")
    return found


def _undivided(model: Mapping[str, Any], tensor_parallel_size: int) -> list[str]:
    heads, found = "num_attention_heads", []
    for name, by in (("hidden_size", heads), (heads, "num_key_value_heads")):
        size, parts = model.get(name), model.get(by)
        if size and parts and size % parts:
            found.append(f"model.cfg.{name}={size} does not divide by model.cfg.{by}={parts}")
    for name in (heads, "num_key_value_heads", "ffn_hidden_size"):
        size = model.get(name)
        if size and size % tensor_parallel_size:
            fitting = [str(n) for n in range(1, min(size, 64) + 1) if not size % n]
            found.append(
                f"model.cfg.{name}={size} does not divide by train.dist.tensor_parallel_size="
                f"{tensor_parallel_size}; sizes that fit are {', '.join(fitting)}"
            )
    try:
        for layer in monarch.layers(model).values():
            check_blocks(monarch.nblocks(layer), tensor_parallel_size)
    except UserError as error:
        found.append(str(error))
    return found
