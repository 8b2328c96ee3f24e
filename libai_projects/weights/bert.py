"""BERT's weights and settings in Hugging Face's files and in ours; see `table`.

The names are those of transformers' BertForPreTraining, or BertForMaskedLM, which has no head for
the order of sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libai_projects.weights.monarch import DENSE, FUSED, INNER, OUTER, QKV
from libai_projects.weights.table import TIED, Config, Part, Setting, Table

_MASKED_ONLY, _HIDDEN = "masked_lm_only", ("hidden_size", "hidden_size")
_OF_BOTH, _OF_MASKED = "BertForPreTraining", "BertForMaskedLM"


def _read_heads(content: Mapping[str, Any], config: Config, where: Path) -> Config:
    return {_MASKED_ONLY: (content.get("architectures") or [_OF_BOTH])[0] == _OF_MASKED}


def _embedding(name: str, theirs: str, rows: str) -> Part:
    axes = (rows, "hidden_size")
    return Part(f"embeddings.{name}", f"bert.embeddings.{theirs}", axes, bias=False)


BERT = Table(
    title="BERT",
    prefix="",
    their_prefix="",
    block="layers.",
    their_block="bert.encoder.layer.",
    before=(
        _embedding("token_embeddings", "word_embeddings", "vocab_size"),
        _embedding("position_embeddings", "position_embeddings", "max_seq_length"),
        _embedding("tokentype_embeddings", "token_type_embeddings", "num_tokentypes"),
        Part("embeddings.layernorm", "bert.embeddings.LayerNorm"),
    ),
    parts=(
        Part(
            f"self_attention.{FUSED}",
            "attention.self.query_key_value",
            _HIDDEN,
            fused=3,
            role=QKV,
            apart=tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
        ),
        Part("self_attention.dense", "attention.output.dense", _HIDDEN, role=DENSE),
        Part("attention_layernorm", "attention.output.LayerNorm"),
        Part(
            "mlp.dense_h_to_4h",
            "intermediate.dense",
            ("hidden_size", "ffn_hidden_size"),
            role=INNER,
        ),
        Part("mlp.dense_4h_to_h", "output.dense", ("ffn_hidden_size", "hidden_size"), role=OUTER),
        Part("output_layernorm", "output.LayerNorm"),
    ),
    after=(
        Part("masked_head.dense", "cls.predictions.transform.dense", _HIDDEN),
        Part("masked_head.layernorm", "cls.predictions.transform.LayerNorm"),
        Part("logits", "cls.predictions", ("vocab_size",), weight=False),
        Part("order_head.pooler", "bert.pooler.dense", _HIDDEN, unless=_MASKED_ONLY),
        Part(
            "order_head.seq_relationship",
            "cls.seq_relationship",
            ("hidden_size", "orders"),
            unless=_MASKED_ONLY,
        ),
    ),
    derived=r"embeddings\.position_ids",
    # The bias of the head is that of cls.predictions.
    their_derived=r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.bias",
    tied=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    model_type="bert",
    architecture=_OF_BOTH,
    ends_of_branches=("self_attention.dense", "mlp.dense_4h_to_h"),
    settings=(
        Setting("num_layers", "num_hidden_layers", 12),
        Setting("hidden_size", "hidden_size", 768),
        Setting("num_attention_heads", "num_attention_heads", 12),
        Setting("ffn_hidden_size", "intermediate_size", 3072),
        Setting("max_seq_length", "max_position_embeddings", 512),
        Setting("vocab_size", "vocab_size", 30522),
        Setting("num_tokentypes", "type_vocab_size", 2),
        Setting("embedding_dropout_prob", "hidden_dropout_prob", 0.1),
        Setting("output_dropout_prob", "hidden_dropout_prob", 0.1),
        Setting("attention_dropout_prob", "attention_probs_dropout_prob", 0.1),
        Setting("layernorm_epsilon", "layer_norm_eps", 1e-12),
        Setting("initializer_range", "initializer_range", 0.02),
    ),
    activation_key="hidden_act",
    activations={
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    },
    must_be={
        "is_decoder": (False, "every token sees all others"),
        "add_cross_attention": (False, "there is no encoder to attend to"),
        TIED: (True, "the head is the token embedding"),
    },
    constants={"is_decoder": False, TIED: True},
    their_linear_is_out_in=True,
    derive=lambda config: {**config, "orders": 2},
    read_more=_read_heads,
    write_more=lambda config: {
        "architectures": [_OF_MASKED if config.get(_MASKED_ONLY) else _OF_BOTH]
    },
    more_keys=(_MASKED_ONLY,),
)
