"""The options of the model, `cfg.model.cfg`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.errors import UserError

from flow_train.config.keys import Amount, Count, Positive
from libai_projects.models.llama.rotary import Rotary
from libai_projects.models.options import ModelOptions


class LlamaOptions(ModelOptions, frozen=True):
    """A Llama's options; null where a rule gives the value.

    `ffn_hidden_size` null is 8 / 3 of hidden_size, rounded up to a multiple of 256.
    `num_key_value_heads` heads of keys and values (null: as many as of queries) are shared by the
    query heads. `rope_scaling` is as in config.json, see `rotary.Rotary`; `rope_interleaved` pairs
    neighbours, as Meta's weights have it, and not halves. `residual_in_fp32` keeps the sum of the
    branches in float32 under mixed precision. `sequence_first` gives activations (time, batch,
    hidden). `sequence_parallel` splits them along the time between attention and feed-forward
    network over tensor parallelism (Korthikanti et al. 2022, section 4.2.2). `pad_token_id` is a
    token whose embedding begins as 0.
    """

    ffn_hidden_size: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_size: Positive | None = None
    max_seq_length: Positive = 2048
    rms_norm_epsilon: Amount = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Any = None
    rope_interleaved: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = True
    sequence_first: bool = False
    sequence_parallel: bool = False
    pad_token_id: Count | None = None

    @property
    def rotary(self) -> Rotary:
        """The model's angles; a UserError for a rope_scaling that does not exist."""
        return Rotary.of(self.head_size, self.rope_theta, self.rope_scaling, self.max_seq_length)


def default_ffn_hidden_size(hidden_size: int) -> int:
    """8 / 3 of the width, rounded down, then up to a multiple of 256 (Touvron et al. 2023, "LLaMA",
    section 2.2, and Meta's code)."""
    return -(-int(8 * hidden_size / 3) // 256) * 256


def from_config(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> LlamaOptions:
    """Read the model's options. UserError: as `check`, and for a vocabulary that does not fit."""
    options = check(cfg, tensor_parallel_size)
    options.check_vocabulary()
    return options


def check(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> LlamaOptions:
    """The same of a config whose vocabulary is not settled yet. UserError: as
    `ModelOptions.checked`, and for positions that the model cannot have."""
    options = LlamaOptions.checked(cfg, tensor_parallel_size)
    width, heads = options.hidden_size, options.num_attention_heads
    rules = {
        "ffn_hidden_size": default_ffn_hidden_size(width),
        "num_key_value_heads": heads,
        "head_size": width // heads,
    }
    unsaid = {name: value for name, value in rules.items() if getattr(options, name) is None}
    options = options.model_copy(update=unsaid)
    if options.head_size % 2:
        raise UserError(
            f"heads of {options.head_size} numbers do not split into pairs for rotary embedding: "
            "change model.cfg.hidden_size or model.cfg.num_attention_heads"
        )
    if options.sequence_parallel and options.max_seq_length % tensor_parallel_size:
        raise UserError(
            f"model.cfg.sequence_parallel needs a model.cfg.max_seq_length that divides by "
            f"train.dist.tensor_parallel_size={tensor_parallel_size}, not {options.max_seq_length}"
        )
    _ = options.rotary
    return options
