"""The options of the model, `cfg.model.cfg`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oneflow_accel.errors import UserError

from libai_projects.models import sizes
from libai_projects.models.llama.rotary import Rotary

_REQUIRED = ("num_layers", "vocab_size", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class ModelOptions:
    """A Llama's sizes and switches, named as in `cfg.model.cfg`; null where a rule gives the value.

    `ffn_hidden_size` null is 8 / 3 of hidden_size, rounded up to a multiple of 256.
    `num_key_value_heads` heads of keys and values (null: as many as of queries) are shared by the
    query heads. `rope_scaling` is as in config.json, see `rotary.Rotary`; `rope_interleaved` pairs
    neighbours, as Meta's weights have it, and not halves. `residual_in_fp32` keeps the sum of the
    branches in float32 under mixed precision. `sequence_first` gives activations (time, batch,
    hidden). `sequence_parallel` splits them along the time between attention and feed-forward
    network over tensor parallelism (Korthikanti et al. 2022, section 4.2.2). `pad_token_id` is a
    token whose embedding begins as 0. `vocab_size` counts padding rows, which begin at
    `vocab_size_real`.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None
    max_seq_length: int = 2048
    embedding_dropout_prob: float = 0.0
    attention_dropout_prob: float = 0.0
    output_dropout_prob: float = 0.0
    rms_norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Any = None
    rope_interleaved: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_scaled_init_for_output_weights: bool = True
    residual_in_fp32: bool = True
    sequence_first: bool = False
    sequence_parallel: bool = False
    pad_token_id: int | None = None
    amp_enabled: bool = False
    vocab_size_real: int | None = None

    @property
    def real_vocabulary(self) -> int:
        return self.vocab_size if self.vocab_size_real is None else self.vocab_size_real

    @property
    def rotary(self) -> Rotary:
        """The model's angles; a UserError for a rope_scaling that does not exist."""
        return Rotary.of(self.head_size, self.rope_theta, self.rope_scaling, self.max_seq_length)


def default_ffn_hidden_size(hidden_size: int) -> int:
    """8 / 3 of the width, rounded down, then up to a multiple of 256 (Touvron et al. 2023, "LLaMA",
    section 2.2, and Meta's code)."""
    return -(-int(8 * hidden_size / 3) // 256) * 256


def from_config(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> ModelOptions:
    """Read the model's options. Keys of others in `cfg.model.cfg` are left alone. A UserError says
    which option is missing or impossible."""
    options = check(cfg, tensor_parallel_size)
    sizes.check_vocabulary(vars(options))
    return options


def check(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> ModelOptions:
    """The same of a config whose vocabulary is not settled yet."""
    missing = [name for name in _REQUIRED if cfg.get(name) is None]
    if missing:
        raise UserError(f"model.cfg lacks {', '.join(missing)}")
    sizes.check(cfg, tensor_parallel_size)
    names = {field.name for field in fields(ModelOptions)}
    given = {str(name): cfg[name] for name in cfg if name in names}
    for name, value in {
        "ffn_hidden_size": default_ffn_hidden_size(given["hidden_size"]),
        "num_key_value_heads": given["num_attention_heads"],
        "head_size": given["hidden_size"] // given["num_attention_heads"],
    }.items():
        if given.get(name) is None:
            given[name] = value
    options = ModelOptions(**given)
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
