"""Train a tiny GPT-2 or Llama a few steps in every layout that is asked for; started by
test_layouts.py.

The argument is a file of JSON: a list of cases, see `Case`. Rank 0 writes the results to the same
name with `.out`: for each case a list of numbers, or the text of what went wrong.
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
from libai.models.utils.graph_base import GraphBase
from libai.utils import distributed as dist
from omegaconf import OmegaConf
from oneflow import nn

from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel
from libai_projects.models.llama.model import LlamaForPreTraining
from tests.libai_projects import reference_gpt2
from tests.libai_projects.magicprompt import gpt2_monarch_weights

SHAPE = reference_gpt2.Shape(layers=2, width=64, heads=4, vocabulary=96, positions=32)
BATCH, STEPS = 8, 6
CONFIG = {
    "num_layers": SHAPE.layers,
    "vocab_size": SHAPE.vocabulary,
    "hidden_size": SHAPE.width,
    "ffn_hidden_size": 4 * SHAPE.width,
    "num_attention_heads": SHAPE.heads,
    "max_seq_length": SHAPE.positions,
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
    # Of graphs.
    accumulation: int = 1
    checkpointing: bool = False
    zero: int = 0
    evaluate: bool = False
    generate: bool = False
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def batches(case: Case) -> list[dict[str, np.ndarray]]:
    """Tokens and the ones after them, the same for every case, and which document they are of."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, SHAPE.vocabulary, (case.steps, BATCH, SHAPE.positions + 1))
    found = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]
    if case.documents > 1:
        for batch in found:
            begins = rng.random(batch["labels"].shape) < case.documents / SHAPE.positions
            batch["segments"] = np.cumsum(begins, axis=1)
    return found


def build(case: Case, scale: float = 0.1) -> nn.Module:
    dist.setup_dist_util(
        OmegaConf.create(
            {
                "data_parallel_size": case.data,
                "tensor_parallel_size": case.tensor,
                "pipeline_parallel_size": case.pipeline,
                "pipeline_num_layers": SHAPE.layers,
            }
        )
    )
    if case.model == "llama":
        # Its first weights are the same in every layout.
        flow.manual_seed(3)
        return LlamaForPreTraining({**CONFIG, **LLAMA, **case.config})
    model = GPT2ForPreTraining({**CONFIG, **case.config})
    state, _ = weights_of(model, scale)
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
    return {name: place(values, -(name == "labels")) for name, values in batch.items()}


def everywhere(x: flow.Tensor) -> np.ndarray:
    x = x.to_global(sbp=[flow.sbp.broadcast] * len(x.sbp))
    return x.to_global(
        placement=flow.placement.all(x.placement.type), sbp=flow.sbp.broadcast
    ).numpy()


def losses(case: Case) -> list[float]:
    """The loss of each step, of AdamW with clipping; with `evaluate` also that of a last batch."""
    model = build(case)
    flow.manual_seed(case.seed)
    optimizer = flow.optim.AdamW(
        [
            {
                "params": list(model.parameters()),
                "clip_grad_max_norm": 1.0,
                "clip_grad_norm_type": 2.0,
            }
        ],
        lr=1e-3,
        weight_decay=0.01,
    )
    model.train()
    step = _graph_step(case, model, optimizer) if case.graph else _eager_step(model, optimizer)
    found = [step(batch) for batch in batches(case)]
    if case.evaluate:
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
        loss = graph(**placed(batch))["lm_loss"]
        return float(everywhere(loss.mean()))

    return step


def _eager_step(model: nn.Module, optimizer: Any) -> Any:
    def step(batch: dict[str, np.ndarray]) -> float:
        loss = model(**placed(batch))["lm_loss"]
        loss.backward()
        optimizer.clip_grad()
        optimizer.step()
        optimizer.zero_grad()
        return float(everywhere(loss))

    return step


def _evaluate(case: Case, model: nn.Module) -> float:
    model.eval()
    inputs = placed(batches(case)[0])
    if case.graph:
        result = GraphBase(model, is_train=False)(**inputs)
    else:
        with flow.no_grad():
            result = model(**inputs)
    token_losses, counted = everywhere(result["token_losses"]), everywhere(result["token_mask"])
    return float((token_losses * counted).sum() / counted.sum())


def generation_errors(case: Case) -> list[float]:
    """Of single steps' logits, on the worst process: with padding or not, cached or not."""
    model = build(case)
    stepper = GPT2StepModel(model)
    _, state = weights_of(model)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, SHAPE.vocabulary, (3, 12))
    lengths = np.array([12, 5, 9])
    padded = np.arange(12) >= 12 - lengths[:, None]
    found = []
    for mask in (None, padded):
        seen = np.ones_like(padded) if mask is None else mask
        positions = np.maximum(np.cumsum(seen, 1) - 1, 0)
        expected = reference_gpt2.forward(state, ids, SHAPE.heads, positions=positions, mask=seen)
        for use_cache in (True, False):
            cache = stepper.start(3, use_cache)
            worst, begin = 0.0, 0
            for end in (8, 9, 10, 12):
                part = None if mask is None else mask[:, :end]
                logits = stepper.step(ids[:, begin:end], positions[:, begin:end], part, cache)
                worst = max(worst, float(abs(logits - expected[:, end - 1]).max()))
                begin = end
            found.append(worst)
    worst_of_all = flow.tensor(found, dtype=flow.float64)
    if flow.env.get_world_size() > 1:
        parts = [flow.zeros_like(worst_of_all) for _ in range(flow.env.get_world_size())]
        flow.comm.all_gather(parts, worst_of_all)
        found = np.max([part.numpy() for part in parts], axis=0).tolist()
    return found


def main() -> None:
    oneflow_accel.select_device()
    path = Path(sys.argv[1])
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
