"""BERT-base on masked tokens and the order of sentences.

Paths come from the environment, the layout from overrides (train.dist.tensor_parallel_size=2 ...).
"""

import os

from libai.config import LazyCall
from libai.data import build_nlp_train_val_test_loader
from libai.scheduler import WarmupPolynomialLR

from libai_projects.configs import get_config
from libai_projects.text.masked import MaskedText
from libai_projects.text.tokenizer import open_tokenizer

graph = get_config("common/models/graph.py").graph
train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
model = get_config("common/models/bert.py").pretrain_model

tokenization = {
    "tokenizer": LazyCall(open_tokenizer)(
        path=os.environ.get("BERT_TOKENIZER", "./bert/tokenizer.json")
    ),
    "append_eod": False,
    "make_vocab_size_divisible_by": 128,
}
dataloader = {
    "train": LazyCall(build_nlp_train_val_test_loader)(
        dataset=[
            LazyCall(MaskedText)(
                data_prefix=os.environ.get("BERT_DATA", "./bert/text"),
                max_seq_length="${model.cfg.max_seq_length}",
                masked_lm_only="${model.cfg.masked_lm_only}",
                # Times that the data has other masks before they repeat.
                copies=10,
            )
        ],
        # Validation is on what prepare.py --validation has held out.
        splits=[[1.0, 0.0, 0.0]],
        weights=[1.0],
        num_workers=1,
    ),
    "test": [],
}

optim.lr = 1e-4
optim.eps = 1e-6

train.output_dir = "projects/BERT/output"
train.load_weight = os.environ.get("BERT_MODEL", "")
train.train_micro_batch_size = 32
train.test_micro_batch_size = 32
train.num_accumulation_steps = 8
train.train_iter = 1000000
train.warmup_ratio = 0.01
train.scheduler = LazyCall(WarmupPolynomialLR)(
    warmup_factor=0.0, end_learning_rate=0.0, warmup_iter=0, max_iter=0
)
