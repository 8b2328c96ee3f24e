"""A GPT-2 of 17.6 million parameters, to train from scratch on the CPUs of a small machine: 4.7 M
in 6 layers, 256 wide, and 12.9 M in the embedding of GPT-2's whole vocabulary."""

from .gpt2_training import dataloader, graph, model, optim, tokenization, train

__all__ = ["dataloader", "graph", "model", "optim", "tokenization", "train"]

model.cfg.num_layers = 6
model.cfg.hidden_size = 256
model.cfg.ffn_hidden_size = 1024
model.cfg.num_attention_heads = 8
model.cfg.max_seq_length = 128

optim.lr = 6e-4
optim.weight_decay = 0.1

dataloader.train.num_workers = 1
dataloader.train.splits = [[900.0, 95.0, 5.0]]

# In eager mode a resumed run equals a whole one to the bit, with dropout too.
graph.enabled = False

train.output_dir = "projects/MagicPrompt/oneflow_magicprompt_small"
train.amp.enabled = False
train.train_micro_batch_size = 8
train.test_micro_batch_size = 8
train.train_epoch = 0
train.train_iter = 20000
train.warmup_ratio = 0.005
train.max_minutes = 30.0
train.log_period = 20
train.checkpointer.period = 200
train.checkpointer.max_to_keep = 2
train.evaluation.eval_period = 100
train.evaluation.eval_iter = 100
train.evaluation.patience = 3
