"""Trains and evaluates LiBai's GPT on the tiny batches; a rank of test_libai_layouts.py.

layout_worker.py OUTPUT ROW...: each ROW is a JSON object with fields of `Row`. The last rank writes
to OUTPUT, by row, the loss of each step and that of the first batch afterwards. Two processes look
at their masks and labels as well.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import oneflow_accel  # noqa: F401 - before oneflow and libai, which it patches

import numpy as np
import oneflow as flow
from libai.data.structures import DistTensorData
from libai.layers import MLP
from libai.models import GPTForPreTraining
from libai.models.utils import GraphBase
from libai.utils import distributed
from omegaconf import OmegaConf

from tests.libai_projects.patches import tiny_gpt as tiny


@dataclass
class Row:
    """A layout: parallel sizes, what a graph does, and which options of the model are on."""

    tensor: int = 1
    pipeline: int = 1
    stages: list[int] | None = None
    graph: bool = False
    accumulate: int = 1
    checkpoint: bool = False
    zero: int = 0
    fuse: bool = False
    layer_scaling: bool = False
    dropout: float = 0.0
    seed: int = 0


def model_of(row: Row) -> GPTForPreTraining:
    layout = {
        "tensor_parallel_size": row.tensor,
        "pipeline_parallel_size": row.pipeline,
        "pipeline_num_layers": tiny.LAYERS,
    }
    if row.stages is not None:
        layout["custom_pipeline_stage_id"] = row.stages
    distributed.setup_dist_util(OmegaConf.create(layout))
    flow.manual_seed(row.seed)
    model = GPTForPreTraining(
        OmegaConf.create(
            {
                "num_layers": tiny.LAYERS,
                "vocab_size": tiny.VOCABULARY,
                "hidden_size": tiny.HIDDEN,
                "ffn_hidden_size": 4 * tiny.HIDDEN,
                "num_attention_heads": tiny.HEADS,
                "max_seq_length": tiny.SEQUENCE,
                "embedding_dropout_prob": row.dropout,
                "attention_dropout_prob": row.dropout,
                "output_dropout_prob": row.dropout,
                "layernorm_epsilon": tiny.LAYER_NORM_EPSILON,
                "initializer_range": 0.02,
                "use_scaled_init_for_output_weights": True,
                "bias_gelu_fusion": row.fuse,
                "bias_dropout_fusion": row.fuse,
                "scale_mask_softmax_fusion": row.fuse,
                "apply_query_key_layer_scaling": row.layer_scaling,
                "amp_enabled": False,
            }
        )
    )
    first = tiny.parameters()
    with flow.no_grad():
        for name, parameter in model.GPT_model.named_parameters():
            whole = [flow.sbp.broadcast] * len(parameter.sbp)
            value = flow.tensor(first.pop(name), placement=parameter.placement, sbp=whole)
            parameter.copy_(value.to_global(sbp=parameter.sbp))
    assert not first
    return model


def tensors_of(batch: np.ndarray) -> tuple[flow.Tensor, flow.Tensor]:
    """Inputs and labels, of which each data-parallel rank reads its own rows."""
    rows = tiny.BATCH // distributed.get_data_parallel_size()
    first = rows * distributed.get_data_parallel_rank()
    mine = batch[first : first + rows]
    inputs = DistTensorData(flow.tensor(mine[:, :-1]))
    labels = DistTensorData(flow.tensor(mine[:, 1:]), placement_idx=-1)
    inputs.to_global()
    labels.to_global()
    return inputs.tensor, labels.tensor


def evaluation_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    logits = logits.astype(np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return float((normalizer - chosen).mean())


def run(row: Row) -> dict[str, object]:
    model = model_of(row)
    settings = {"clip_grad_max_norm": tiny.CLIP_NORM, "clip_grad_norm_type": 2.0}
    optimizer = flow.optim.AdamW(
        [{"params": list(model.parameters()), **settings}],
        lr=tiny.LEARNING_RATE,
        weight_decay=tiny.WEIGHT_DECAY,
    )
    constant = flow.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=1)
    train_graph = evaluate = None
    if row.graph:
        train_graph = GraphBase(
            model,
            optimizer,
            constant,
            activation_checkpoint=row.checkpoint,
            grad_acc_steps=row.accumulate,
            zero_optim=row.zero > 0,
            zero_stage=row.zero,
        )
        evaluate = GraphBase(model, is_train=False)
    model.train()
    losses = []
    data = tiny.batches()
    for batch in data:
        inputs, labels = tensors_of(batch)
        if train_graph is not None:
            loss = train_graph(input_ids=inputs, labels=labels)["lm_loss"]
        else:
            loss = model(inputs, labels)["lm_loss"]
            loss.backward()
            optimizer.clip_grad()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(distributed.tton(loss.mean())))
    model.eval()
    inputs, _ = tensors_of(data[0])
    with flow.no_grad():
        out = model(inputs) if evaluate is None else evaluate(input_ids=inputs)
        logits = distributed.tton(out["prediction_scores"])
    # Only the ranks of the last stage have losses and logits.
    evaluation = evaluation_loss(logits, data[0][:, 1:]) if logits.size else None
    return {"losses": losses, "evaluation": evaluation}


def masks() -> None:
    """Dropout masks differ between parts of a split tensor and agree on copies of another one."""
    distributed.setup_dist_util(
        OmegaConf.create({"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    )
    # As a data-parallel run may: each rank seeds with a number of its own.
    flow.manual_seed(7 + flow.env.get_rank())
    layer = MLP(8, 8, output_dropout_prob=0.5).dropout
    ones = flow.ones(400, 8, placement=distributed.get_layer_placement(0), sbp=flow.sbp.broadcast)
    copies = layer(ones).to_local().numpy()
    halves = distributed.tton(layer(ones.to_global(sbp=flow.sbp.split(0))))
    assert (halves[:200] != halves[200:]).any(), "the parts have the same mask"
    theirs = flow.tensor(copies).to_global(
        placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0)
    )
    first, second = np.split(distributed.tton(theirs), 2)
    assert (first == second).all(), "the copies have different masks"
    assert set(np.unique(first)) == {0, 2}


def labels() -> None:
    """Labels on the last stage are those of the first stage's data, whatever its ranks read."""
    distributed.setup_dist_util(
        OmegaConf.create(
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "pipeline_num_layers": 2}
        )
    )
    data = DistTensorData(flow.tensor([[flow.env.get_rank()]]), placement_idx=-1)
    data.to_global()
    assert data.tensor.placement == distributed.get_layer_placement(-1)
    # Every rank looks, so that none waits for one that has failed.
    everywhere = flow.placement("cpu", [0, 1])
    seen = data.tensor.to_global(placement=everywhere, sbp=flow.sbp.broadcast).to_local()
    assert seen.numpy().tolist() == [[0]]


def main() -> None:
    output, *rows = sys.argv[1:]
    results = [run(Row(**json.loads(row))) for row in rows]
    if flow.env.get_world_size() == 2:
        masks()
        labels()
    if distributed.is_last_process():
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
