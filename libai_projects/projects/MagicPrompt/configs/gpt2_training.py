"""GPT-2 124M on prompts for image generators.

Paths come from the environment, the layout from overrides (train.dist.tensor_parallel_size=2 ...).
"""

import os

from libai_projects.configs import get_config

graph = get_config("common/models/graph.py").graph
train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
model = get_config("common/models/gpt.py").pretrain_model
data = get_config("common/data/gpt_dataset.py")
tokenization, dataloader = data.tokenization, data.dataloader
# Every public name of this file is a key of the config.
del data

tokenization.tokenizer.vocab_file = os.environ.get("MAGICPROMPT_VOCAB", "./magicprompt/vocab.json")
tokenization.tokenizer.merges_file = os.environ.get(
    "MAGICPROMPT_MERGES", "./magicprompt/merges.txt"
)
dataloader.train.dataset[0].data_prefix = os.environ.get(
    "MAGICPROMPT_DATA", "./magicprompt/train/en_train_mmap_text_document"
)

optim.lr = 5e-5

train.output_dir = "projects/MagicPrompt/oneflow_magicprompt"
train.load_weight = os.environ.get("MAGICPROMPT_MODEL", "")
train.train_epoch = 33
train.train_iter = 10000
train.log_period = 50
train.amp.enabled = True
train.checkpointer.period = 8000
train.checkpointer.max_to_keep = 20
train.evaluation.eval_period = 4000
train.evaluation.eval_iter = 250
