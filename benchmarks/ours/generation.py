"""LiBai's models: greedy decoding of GPT-2 small and of a Llama, a token at a time, and training of
the Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from benchmarks.items import LLAMA
from benchmarks.ours.models import BOTH
from benchmarks.serve import Maker, Step
from libai_projects.models.families import family_of
from libai_projects.models.gpt2.model import GPT2ForPreTraining
from libai_projects.models.llama.model import LlamaForPreTraining
from libai_projects.weights.llama import LLAMA as LLAMA_TABLE

_GPT2_SMALL = {
    "num_layers": 12,
    "vocab_size": 50257,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
}
_ONE_PROCESS = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def _model(name: str) -> Any:
    dist.setup_dist_util(OmegaConf.create(_ONE_PROCESS))
    if name == "GPT-2":
        return GPT2ForPreTraining(OmegaConf.create(_GPT2_SMALL))
    config = LLAMA_TABLE.read_config({"model_type": "llama", **LLAMA}, Path("benchmarks/items.py"))
    return LlamaForPreTraining(config)


def decode(model: str, weights: str, batch: int, prompt: int, tokens: int) -> Step:
    """The next tokens of sequences that were read; each step begins at their end again."""
    net = _model(model).eval()
    steps = family_of(net).steps(net, weights_dtype=weights)
    prompts = np.random.default_rng(0).integers(0, steps.vocab_size, (batch, prompt)).tolist()
    cache = steps.new_cache()
    read = [cache.pages.add()[0] for _ in prompts]
    first = steps.run(steps.plan(cache, list(zip(read, prompts, strict=True))), cache).argmax(-1)

    def step() -> None:
        rows, last = [cache.pages.fork(number) for number in read], first
        for _ in range(tokens):
            plan = steps.plan(cache, [(row, [int(id)]) for row, id in zip(rows, last, strict=True)])
            last = steps.run(plan, cache).argmax(-1)
        for row in rows:
            cache.pages.release(row)

    return step


def llama_train(batch: int, tokens: int) -> Step:
    """As LiBai's trainer runs it in eager mode."""
    model = _model("Llama")
    place = {"placement": dist.get_layer_placement(0), "sbp": dist.get_hidden_sbp()}
    ids = flow.randint(0, LLAMA["vocab_size"], (batch, tokens), **place)
    return BOTH.train(BOTH.adamw(model), lambda: model(ids, ids)["lm_loss"])


MAKERS: dict[str, Maker] = {"decode": decode, "llama_train": llama_train}
