"""GPT-2's weights and settings in Hugging Face's files and in LiBai's; see `table`."""

from __future__ import annotations

from libai_projects.weights.monarch import DENSE, FUSED, INNER, OUTER, QKV
from libai_projects.weights.table import TIED, Part, Setting, Table

_BY_LAYER = "scale_attn_by_inverse_layer_idx"
_SQUARE = ("hidden_size", "hidden_size")

GPT2 = Table(
    title="GPT-2",
    prefix="GPT_model.",
    their_prefix="transformer.",
    block="transformer.layers.",
    their_block="h.",
    before=(
        Part("embeddings.token_embeddings", "wte", ("vocab_size", "hidden_size"), bias=False),
        Part(
            "embeddings.position_embeddings", "wpe", ("max_seq_length", "hidden_size"), bias=False
        ),
    ),
    parts=(
        Part("input_layernorm", "ln_1"),
        Part(f"self_attention.{FUSED}", "attn.c_attn", _SQUARE, fused=3, role=QKV),
        Part("self_attention.dense", "attn.c_proj", _SQUARE, role=DENSE),
        Part("post_attention_layernorm", "ln_2"),
        Part("mlp.dense_h_to_4h", "mlp.c_fc", ("hidden_size", "ffn_hidden_size"), role=INNER),
        Part("mlp.dense_4h_to_h", "mlp.c_proj", ("ffn_hidden_size", "hidden_size"), role=OUTER),
    ),
    after=(
        Part("transformer.layernorm_f", "ln_f"),
        Part("lm_head", "lm_head", ("vocab_size", "hidden_size"), bias=False, unless=TIED),
    ),
    # Causal masks and position numbers that some versions keep beside the weights.
    derived=r"casual_mask\.mask|embeddings\.position_ids"
    r"|transformer\.layers\.\d+\.self_attention\.bias",
    their_derived=r"h\.\d+\.attn\.(masked_)?bias",
    tied=("lm_head.weight", "wte.weight"),
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    ends_of_branches=("self_attention.dense", "mlp.dense_4h_to_h"),
    settings=(
        Setting("num_layers", "n_layer", 12),
        Setting("hidden_size", "n_embd", 768),
        Setting("num_attention_heads", "n_head", 12),
        Setting("max_seq_length", "n_positions", 1024),
        Setting("vocab_size", "vocab_size", 50257),
        Setting("embedding_dropout_prob", "embd_pdrop", 0.1),
        Setting("attention_dropout_prob", "attn_pdrop", 0.1),
        Setting("output_dropout_prob", "resid_pdrop", 0.1),
        Setting("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
        Setting("initializer_range", "initializer_range", 0.02),
        Setting("ffn_hidden_size", "n_inner", lambda config: 4 * config["hidden_size"]),
        Setting(_BY_LAYER, _BY_LAYER, False),
        Setting(TIED, TIED, True),
    ),
    activations={
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
    },
    must_be={
        "scale_attn_weights": (True, "attention is scaled by 1/sqrt(head size)"),
        "add_cross_attention": (False, "there is no encoder to attend to"),
    },
    constants={
        "reorder_and_upcast_attn": False,
        "scale_attn_weights": True,
        "use_cache": True,
    },
    rows=50257,
    # What says nothing of it is tied, as all were before there was such a key.
    derive=lambda config: {**config, TIED: config.get(TIED) is not False},
)
