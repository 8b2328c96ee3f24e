"""Trains a small GPT-2 of ours; test_sharded_gpt2.py starts it.

sharded_worker.py FOLDER WAY...: "whole", or how `fully_shard` cuts the model. Rank 0 writes losses,
gradient norms and the weights afterwards to FOLDER/WAY.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oneflow_accel import agree, distributed

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from flow_train.sharding import fully_shard
from libai_projects.models.gpt2.model import GPT2ForPreTraining

WAYS = {
    "recomputed": {},
    "weights kept": {"recompute": False, "reshard_after_forward": False},
    "flat": {"flatten": True},
    "with dropout": {},
    "with dropout, kept": {"recompute": False},
}
STEPS, BATCH, TIME = 4, 4, 7
OPTIONS = {"vocab_size": 24, "hidden_size": 12, "num_attention_heads": 2, "max_seq_length": TIME}
OPTIONS |= {"ffn_hidden_size": 20, "num_layers": 3}


DROPOUT = ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob")


def train(output: Path, way: str) -> None:
    flow.manual_seed(5)
    dropout = dict.fromkeys(DROPOUT, 0.1 if "dropout" in way else 0.0)
    model = GPT2ForPreTraining(OmegaConf.create(OPTIONS | dropout))
    cut = None if way == "whole" else fully_shard(model, **WAYS[way])
    # The gradient of attention's key biases is zero but for rounding, which a small eps blows up.
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        ids = draw.integers(0, OPTIONS["vocab_size"], (BATCH, TIME + 1))
        flow.manual_seed(100 * step + distributed.rank())
        loss = model(of_all(ids[:, :-1]), of_all(ids[:, 1:]))["lm_loss"]
        loss.backward()
        losses.append(agree.whole(loss, to=None).numpy())
        if cut is None:
            squares = [float((p.grad * p.grad).sum().to_local()) for p in model.parameters()]
            norms.append(np.sqrt(sum(squares)))
        else:
            norms.append(cut.gradient_norm().numpy().item())
        optimizer.step()
        optimizer.zero_grad()
    if cut is None:
        weights = {name: value.to_local().numpy() for name, value in model.named_parameters()}
    else:
        weights = {name: value.numpy() for name, value in cut.named_weights()}
    if distributed.is_main():
        np.savez(output, losses=losses, norms=norms, **weights)


def of_all(rows: np.ndarray) -> flow.Tensor:
    """A batch that every process has, split over them."""
    placement = dist.get_layer_placement(0)
    whole = flow.tensor(rows, placement=placement, sbp=dist.get_nd_sbp([flow.sbp.broadcast] * 2))
    return whole.to_global(sbp=dist.get_nd_sbp([flow.sbp.split(0), flow.sbp.broadcast]))


if __name__ == "__main__":
    layout = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    layout["pipeline_num_layers"] = OPTIONS["num_layers"]
    dist.setup_dist_util(OmegaConf.create(layout))
    for name in sys.argv[2:]:
        train(Path(sys.argv[1], f"{name}.npz"), name)
