"""BERT-large, of 335 million parameters (Devlin et al. 2019)."""

from .bert_pretraining import dataloader, graph, model, optim, tokenization, train

__all__ = ["dataloader", "graph", "model", "optim", "tokenization", "train"]

model.cfg.num_layers = 24
model.cfg.hidden_size = 1024
model.cfg.ffn_hidden_size = 4096
model.cfg.num_attention_heads = 16
