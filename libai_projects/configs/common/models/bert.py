"""BERT-base, of 110 million parameters (Devlin et al. 2019)."""

from libai.config import LazyCall

from libai_projects.models.bert.model import BertPretrainingModel

cfg = {
    "num_layers": 12,
    # The trainer pads it to a multiple of tokenization.make_vocab_size_divisible_by.
    "vocab_size": 30592,
    "vocab_size_real": 30522,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "max_seq_length": 512,
    # Kinds of sentences: a pair has two.
    "num_tokentypes": 2,
    # No head for the order of sentences, and samples without pairs.
    "masked_lm_only": False,
    "embedding_dropout_prob": 0.1,
    "attention_dropout_prob": 0.1,
    "output_dropout_prob": 0.1,
    "layernorm_epsilon": 1e-12,
    "initializer_range": 0.02,
    "use_scaled_init_for_output_weights": False,
    # The erf form; "gelu_tanh" and "relu" are others.
    "activation": "gelu",
    # Linear layers that are structured: null (dense), monarch, blockdiag, or
    # {_target_: monarch_flow.layers.BlockdiagLinear, nblocks: 4}.
    "mlp_cfg": None,
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

pretrain_model = LazyCall(BertPretrainingModel)(cfg=cfg)
