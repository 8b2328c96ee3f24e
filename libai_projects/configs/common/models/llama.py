"""The Llama of the Z2all project, of 1.26 billion parameters: TinyLlama's shape with a vocabulary
of 64,320 tokens."""

from libai.config import LazyCall

from libai_projects.models.llama.model import LlamaForPreTraining

cfg = {
    "num_layers": 22,
    # The trainer pads it to a multiple of tokenization.make_vocab_size_divisible_by.
    "vocab_size": 64320,
    "vocab_size_real": None,
    "hidden_size": 2048,
    # null: 8 / 3 of hidden_size, rounded up to a multiple of 256.
    "ffn_hidden_size": 5632,
    "num_attention_heads": 32,
    # Heads of keys and values, which the query heads share; null: as many.
    "num_key_value_heads": 8,
    # null: hidden_size / num_attention_heads.
    "head_size": None,
    "max_seq_length": 2048,
    "embedding_dropout_prob": 0.0,
    "attention_dropout_prob": 0.0,
    "output_dropout_prob": 0.0,
    "rms_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    # As in a config.json: {rope_type: linear, factor: 2.0}, dynamic, llama3, yarn or longrope;
    # null: none.
    "rope_scaling": None,
    # Pairs of neighbours, as in Meta's code, and not of halves of a head.
    "rope_interleaved": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    # Linear layers that are Monarch or block-diagonal, as GPT-2 has them: of the feed-forward
    # network, of queries, keys and values, after attention.
    "mlp_cfg": None,
    "attnlinear_cfg": None,
    "attnproj_cfg": None,
    "initializer_range": 0.02,
    "use_scaled_init_for_output_weights": True,
    "residual_in_fp32": True,
    # Activations (time, batch, hidden).
    "sequence_first": False,
    # Splits norms and residuals along the time over tensor parallelism.
    "sequence_parallel": False,
    # A token whose embedding begins as 0.
    "pad_token_id": None,
    "amp_enabled": False,
}
pretrain_model = LazyCall(LlamaForPreTraining)(cfg=cfg)
