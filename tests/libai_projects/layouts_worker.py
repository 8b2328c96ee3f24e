"""Train a tiny GPT-2, Llama, BERT or GPT of LiBai's a few steps in every layout that is asked for,
for test_parallel_layouts.py.

The argument is a file of JSON: a list of cases, see `Case`. Rank 0 writes the results to the same
name with `.out`: for each case a list of numbers, or the text of what went wrong. Two processes
look at masks and labels as well.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oneflow_accel

import numpy as np
import oneflow as flow
from libai.data.structures import DistTensorData
from libai.layers import MLP
from libai.models import GPTForPreTraining
from libai.models.utils.graph_base import GraphBase
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from oneflow import nn

from flow_train.sharding import Sharding, fully_shard
from libai_projects.generation.interface import ModelState
from libai_projects.models.bert.model import BertPretrainingModel
from libai_projects.models.families import family_of
from libai_projects.models.gpt2.model import GPT2ForPreTraining
from libai_projects.models.llama.model import LlamaForPreTraining
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt import gpt2_monarch_weights
from tests.libai_projects.patches import tiny_gpt as tiny

SHAPE = reference_gpt2.Shape(layers=2, width=64, heads=4, vocabulary=96, positions=32)
BATCH, STEPS = 8, 6
CONFIG = SHAPE.config()

LIBAI = {
    "num_layers": tiny.LAYERS,
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": tiny.HIDDEN,
    "ffn_hidden_size": 4 * tiny.HIDDEN,
    "num_attention_heads": tiny.HEADS,
    "max_seq_length": tiny.SEQUENCE,
    "embedding_dropout_prob": 0.0,
    "attention_dropout_prob": 0.0,
    "output_dropout_prob": 0.0,
    "layernorm_epsilon": tiny.LAYER_NORM_EPSILON,
    "initializer_range": 0.02,
    "use_scaled_init_for_output_weights": True,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "scale_mask_softmax_fusion": False,
    "apply_query_key_layer_scaling": False,
    "amp_enabled": False,
}
LLAMA = {"ffn_hidden_size": 96, "num_key_value_heads": 2, "initializer_range": 0.1}


@dataclass(frozen=True)
class Case:
    model: str = "gpt2"
    steps: int = STEPS
    # Documents of a row: packed, they do not see each other.
    documents: int = 1
    graph: bool = False
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    stages: list[int] | None = None
    # Of graphs.
    accumulation: int = 1
    checkpointing: bool = False
    zero: int = 0
    # Options of fully_shard.
    sharded: dict[str, Any] | None = None
    evaluate: bool = False
    generate: bool = False
    weights_dtype: str = "float32"
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def batches(case: Case) -> list[dict[str, np.ndarray]]:
    """Tokens and the ones after them, the same for every case, and which document they are of."""
    if case.model == "libai":
        return [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tiny.batches()]
    rng = np.random.default_rng(7)
    if case.model == "bert":
        return [pairs(rng) for _ in range(case.steps)]
    tokens = rng.integers(0, SHAPE.vocabulary, (case.steps, BATCH, SHAPE.positions + 1))
    found = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    if case.documents > 1:
        for batch in found:
            begins = rng.random(batch["labels"].shape) < case.documents / SHAPE.positions
            batch["segments"] = np.cumsum(begins, axis=1)
    return found


def pairs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two sentences a row, the second padded by up to 8. Rows have as many masked places, so that
    means of parts are parts of the mean."""
    ids = rng.integers(0, SHAPE.vocabulary, (BATCH, SHAPE.positions))
    labels = np.full_like(ids, -1)
    places = rng.permuted(np.tile(np.arange(SHAPE.positions - 8), (BATCH, 1)), axis=1)[:, :5]
    np.put_along_axis(labels, places, np.take_along_axis(ids, places, 1), 1)
    np.put_along_axis(ids, places, 1, 1)
    ends = SHAPE.positions - rng.integers(0, 9, (BATCH, 1))
    columns = np.arange(SHAPE.positions)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (columns < ends).astype(np.int64),
        "tokentype_ids": (columns >= rng.integers(5, 20, (BATCH, 1))).astype(np.int64),
        "ns_labels": rng.integers(0, 2, BATCH),
    }


def build(case: Case, scale: float = 0.1) -> nn.Module:
    layout = {
        "data_parallel_size": case.data,
        "tensor_parallel_size": case.tensor,
        "pipeline_parallel_size": case.pipeline,
        "pipeline_num_layers": tiny.LAYERS if case.model == "libai" else SHAPE.layers,
        "custom_pipeline_stage_id": case.stages,
    }
    dist.setup_dist_util(OmegaConf.create(layout))
    if case.model == "llama":
        # Its first weights are the same in every layout.
        flow.manual_seed(3)
        return LlamaForPreTraining({**CONFIG, **LLAMA, **case.config})
    if case.model == "bert":
        flow.manual_seed(3)
        return BertPretrainingModel({**CONFIG, "initializer_range": 0.1, **case.config})
    if case.model == "libai":
        model = GPTForPreTraining(OmegaConf.create({**LIBAI, **case.config}))
        state = {f"GPT_model.{name}": array for name, array in tiny.parameters().items()}
    else:
        model = GPT2ForPreTraining({**CONFIG, **case.config})
        state, _ = weights_of(model, scale)
    return filled(model, state)


def filled(model: nn.Module, state: dict[str, np.ndarray]) -> nn.Module:
    for name, parameter in model.named_parameters():
        value = flow.tensor(state[name], placement=parameter.placement, sbp=parameter.sbp)
        parameter.data.copy_(value)
    return model


def weights_of(model: GPT2ForPreTraining, scale: float = 0.1) -> tuple[Any, Any]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rows = model.GPT_model.options.vocab_size
    return gpt2_monarch_weights.of_model(shapes, SHAPE, scale, rows)


def place(values: np.ndarray, layer: int) -> flow.Tensor:
    placement = dist.get_layer_placement(layer)
    return flow.tensor(values, placement=placement, sbp=dist.get_hidden_sbp())


def placed(batch: dict[str, np.ndarray]) -> dict[str, flow.Tensor]:
    return {name: place(values, -name.endswith("labels")) for name, values in batch.items()}


def everywhere(x: flow.Tensor) -> np.ndarray:
    x = x.to_global(sbp=[flow.sbp.broadcast] * len(x.sbp))
    return x.to_global(
        placement=flow.placement.all(x.placement.type), sbp=flow.sbp.broadcast
    ).numpy()


def losses(case: Case) -> list[float]:
    """The loss of each step, of AdamW with clipping; with `evaluate` also that of a last batch."""
    model = build(case)
    cut = None if case.sharded is None else fully_shard(model, **case.sharded)
    flow.manual_seed(case.seed)
    optimizer = flow.optim.AdamW(
        [
            {
                "params": list(model.parameters()),
                "clip_grad_max_norm": 1.0,
                "clip_grad_norm_type": 2.0,
            }
        ],
        lr=tiny.LEARNING_RATE if case.model == "libai" else 1e-3,
        weight_decay=0.01,
    )
    model.train()
    step = _graph_step(case, model, optimizer) if case.graph else _eager_step(model, optimizer, cut)
    found = []
    for number, batch in enumerate(batches(case)):
        if cut is not None:
            # Drawing masks again moves the generator on.
            flow.manual_seed(number)
        found.append(step(batch))
    if case.evaluate:
        if cut is not None:
            # By the weights as a checkpoint has them.
            state = {name: value.numpy() for name, value in cut.named_weights()}
            model = filled(build(case), state)
        found.append(_evaluate(case, model))
    return found


def _graph_step(case: Case, model: nn.Module, optimizer: Any) -> Any:
    graph = GraphBase(
        model,
        optimizer,
        activation_checkpoint=case.checkpointing,
        grad_acc_steps=case.accumulation,
        zero_optim=case.zero > 0,
        zero_stage=case.zero,
    )

    def step(batch: dict[str, np.ndarray]) -> float:
        losses = graph(**placed(batch))
        return sum(float(everywhere(loss.mean())) for loss in losses.values())

    return step


def _eager_step(model: nn.Module, optimizer: Any, cut: Sharding | None) -> Any:
    def step(batch: dict[str, np.ndarray]) -> float:
        loss = sum(model(**placed(batch)).values())
        loss.backward()
        optimizer.clip_grad() if cut is None else cut.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(everywhere(loss))

    return step


def _evaluate(case: Case, model: nn.Module) -> float:
    model.eval()
    batch = batches(case)[0]
    # LiBai's own gives no losses of tokens.
    labels = batch.pop("labels") if case.model == "libai" else None
    inputs = placed(batch)
    if case.graph:
        result = GraphBase(model, is_train=False)(**inputs)
    else:
        with flow.no_grad():
            result = model(**inputs)
    if labels is not None:
        logits = everywhere(result["prediction_scores"]).astype(np.float64)
        chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return float((np.log(np.exp(logits).sum(-1)) - chosen).mean())
    token_losses, counted = everywhere(result["token_losses"]), everywhere(result["token_mask"])
    return float((token_losses * counted).sum() / counted.sum())


def generation_errors(case: Case) -> list[float]:
    """Of single steps' logits, on the worst process: cached or not, and of GPT-2, whose reference
    knows padding, with padding too."""
    model = build(case)
    llama = case.model == "llama"
    stepper = family_of(model).steps(model, weights_dtype=case.weights_dtype)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, SHAPE.vocabulary, (3, 12))
    lengths = np.array([12, 5, 9])
    padded = np.arange(12) >= 12 - lengths[:, None]
    found = []
    for mask in (None,) if llama else (None, padded):
        seen = np.ones_like(padded) if mask is None else mask
        positions = np.maximum(np.cumsum(seen, 1) - 1, 0)
        if llama:
            expected = everywhere(model.eval()(place(ids, 0))["prediction_scores"])
        else:
            _, state = weights_of(model)
            expected = reference_gpt2.forward(
                state, ids, SHAPE.heads, positions=positions, mask=seen
            )
        for use_cache in (True, False):
            state = ModelState(stepper, 3, use_cache)
            worst, begin = 0.0, 0
            for end in (8, 9, 10, 12):
                now = slice(begin, end)
                logits = state.read(
                    [row[now][real[now]] for row, real in zip(ids, seen, strict=True)]
                )
                worst = max(worst, float(abs(logits - expected[:, end - 1]).max()))
                begin = end
            found.append(worst)
    worst_of_all = flow.tensor(found, dtype=flow.float64)
    if flow.env.get_world_size() > 1:
        parts = [flow.zeros_like(worst_of_all) for _ in range(flow.env.get_world_size())]
        flow.comm.all_gather(parts, worst_of_all)
        found = np.max([part.numpy() for part in parts], axis=0).tolist()
    return found


def masks() -> None:
    """Dropout masks differ between parts of a split tensor and agree on copies of another one."""
    dist.setup_dist_util(OmegaConf.create({"tensor_parallel_size": 1, "pipeline_parallel_size": 1}))
    # As a data-parallel run may: each rank seeds with a number of its own.
    flow.manual_seed(7 + flow.env.get_rank())
    layer = MLP(8, 8, output_dropout_prob=0.5).dropout
    ones = flow.ones(400, 8, placement=dist.get_layer_placement(0), sbp=flow.sbp.broadcast)
    copies = layer(ones).to_local().numpy()
    halves = dist.tton(layer(ones.to_global(sbp=flow.sbp.split(0))))
    assert (halves[:200] != halves[200:]).any(), "the parts have the same mask"
    theirs = flow.tensor(copies).to_global(
        placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0)
    )
    first, second = np.split(dist.tton(theirs), 2)
    assert (first == second).all(), "the copies have different masks"
    assert set(np.unique(first)) == {0, 2}


def labels() -> None:
    """Labels on the last stage are those of the first stage's data, whatever its ranks read."""
    dist.setup_dist_util(
        OmegaConf.create(
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "pipeline_num_layers": 2}
        )
    )
    data = DistTensorData(flow.tensor([[flow.env.get_rank()]]), placement_idx=-1)
    data.to_global()
    assert data.tensor.placement == dist.get_layer_placement(-1)
    # Every rank looks, so that none waits for one that has failed.
    everywhere = flow.placement("cpu", [0, 1])
    seen = data.tensor.to_global(placement=everywhere, sbp=flow.sbp.broadcast).to_local()
    assert seen.numpy().tolist() == [[0]]


def main() -> None:
    oneflow_accel.select_device()
    path = Path(sys.argv[1])
    if flow.env.get_world_size() == 2:
        masks()
        labels()
    results: list[Any] = []
    for values in json.loads(path.read_text()):
        try:
            case = Case(**values)
            results.append(generation_errors(case) if case.generate else losses(case))
        except Exception:
            results.append(traceback.format_exc()[-2000:])
        if flow.env.get_rank() == 0:
            path.with_suffix(".out").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
