"""GPT-2 of 124M parameters (Radford et al., 2019, table 2)."""

from libai.config import LazyCall

from libai_projects.models.gpt2.model import GPT2ForPreTraining

cfg = {
    "num_layers": 12,
    # The trainer pads it to a multiple of tokenization.make_vocab_size_divisible_by; logits of the
    # rows at or above vocab_size_real are masked.
    "vocab_size": 50304,
    "vocab_size_real": 50257,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "max_seq_length": 1024,
    "embedding_dropout_prob": 0.1,
    "attention_dropout_prob": 0.1,
    "output_dropout_prob": 0.1,
    "layernorm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "use_scaled_init_for_output_weights": True,
    # OpenAI's weights were trained with the tanh form; "gelu" is the erf form, "relu" another.
    "activation": "gelu_tanh",
    # Scores of attention in layer i, from 0, divided by i + 1.
    "scale_attn_by_inverse_layer_idx": False,
    # The weight of the logits is the token embedding.
    "tie_word_embeddings": True,
    # Linear layers that are Monarch or block-diagonal: null (dense), monarch, blockdiag, or
    # {_target_: monarch_flow.layers.MonarchLinear, nblocks: 4}.
    "mlp_cfg": None,
    # Queries, keys and values; the projection after attention.
    "attnlinear_cfg": None,
    "attnproj_cfg": None,
    # null: what the device has.
    "bias_gelu_fusion": None,
    "bias_dropout_fusion": None,
    "scale_mask_softmax_fusion": None,
    "attention_fusion": None,
    # Neutral in exact arithmetic; keeps float16 scores in range.
    "apply_query_key_layer_scaling": False,
    "amp_enabled": False,
}

pretrain_model = LazyCall(GPT2ForPreTraining)(cfg=cfg)
