"""A BERT of 1.3 million parameters on one-line prompts, for the CPUs of a small machine."""

from .bert_pretraining import dataloader, graph, model, optim, tokenization, train

__all__ = ["dataloader", "graph", "model", "optim", "tokenization", "train"]

model.cfg.num_layers = 4
model.cfg.hidden_size = 128
model.cfg.ffn_hidden_size = 512
model.cfg.num_attention_heads = 4
model.cfg.max_seq_length = 48
# A prompt is one sentence.
model.cfg.masked_lm_only = True
model.cfg.embedding_dropout_prob = 0.0
model.cfg.attention_dropout_prob = 0.0
model.cfg.output_dropout_prob = 0.0

optim.lr = 2e-3

graph.enabled = False

train.output_dir = "projects/BERT/bert_small"
train.train_micro_batch_size = 32
train.test_micro_batch_size = 32
train.num_accumulation_steps = 1
train.train_iter = 600
train.warmup_ratio = 0.1
train.log_period = 50
train.checkpointer.period = 300
train.checkpointer.max_to_keep = 2
train.evaluation.eval_period = 100
train.evaluation.eval_iter = 20
