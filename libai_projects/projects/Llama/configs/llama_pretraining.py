"""The Llama of the Z2all diary, trained from token files; `pretrain.py` fills it in.

It is a config like others: tools/train_net.py takes it too.
"""

from oneflow_accel.kernels.optimizer import AdamW

from libai.config import LazyCall
from libai.data import build_nlp_train_val_test_loader

from libai_projects.configs import get_config
from libai_projects.projects.Llama.schedule import warmup_cosine
from libai_projects.text.loaders import TokenFiles

graph = get_config("common/models/graph.py").graph
train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
model = get_config("common/models/llama.py").pretrain_model

# The data's vocabulary is the model's.
tokenization = None
dataloader = {
    "train": LazyCall(build_nlp_train_val_test_loader)(
        dataset=[
            LazyCall(TokenFiles)(
                path="",
                max_seq_length="${model.cfg.max_seq_length}",
                vocab_size="${model.cfg.vocab_size}",
                dtype="uint16",
                packing="stream",
            )
        ],
        splits=[[1.0, 0.0, 0.0]],
        weights=[1.0],
        # Token files are read from a memory map. A worker, a fork, would keep the first weights.
        num_workers=0,
    ),
    "test": [],
    # Token files to evaluate on; "": PREFIX_valid.bin beside PREFIX.bin, if it is there.
    "validation_data": "",
}

# Whose step can be switched off, as the other fused operations can.
optim._target_ = AdamW
optim.lr = 4e-4
optim.weight_decay = 0.1
optim.betas = [0.9, 0.95]

train.output_dir = "projects/Llama/output"
train.max_minutes = None
train.train_micro_batch_size = 2
train.num_accumulation_steps = 16
train.train_iter = 100000
train.seed = 1337
train.log_period = 1
train.scheduler = LazyCall(warmup_cosine)(
    warmup_iters=2000, decay_iters=100000, alpha=0.1, max_iter=0, warmup_iter=0
)
train.checkpointer.period = 1000
train.checkpointer.max_to_keep = 2
train.evaluation.eval_period = 1000
train.evaluation.eval_iter = 100
graph.enabled = False
