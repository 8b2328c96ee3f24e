"""BERT-base, of 110 million parameters (Devlin et al. 2019); all else is as GPT-2's."""

from libai.config import LazyCall

from libai_projects.models.bert.model import BertPretrainingModel

from .gpt import cfg as gpt

cfg = {
    **gpt,
    "vocab_size": 30592,
    "vocab_size_real": 30522,
    "max_seq_length": 512,
    # Kinds of sentences: a pair has two.
    "num_tokentypes": 2,
    # No head for the order of sentences, and samples without pairs.
    "masked_lm_only": False,
    "layernorm_epsilon": 1e-12,
    "use_scaled_init_for_output_weights": False,
    "activation": "gelu",
}
# The head is the token embedding.
del cfg["tie_word_embeddings"]

pretrain_model = LazyCall(BertPretrainingModel)(cfg=cfg)
