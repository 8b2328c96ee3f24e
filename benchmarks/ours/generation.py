"""LiBai's models: greedy decoding of GPT-2 small with MagicPrompt's, as its pipeline runs it, and
training of a Llama."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from benchmarks.items import LLAMA
from benchmarks.ours.models import BOTH
from benchmarks.serve import Maker, Step
from libai_projects.generation import GenerationOptions, generate
from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel
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


def gpt2_greedy(batch: int, prompt: int, tokens: int) -> Step:
    dist.setup_dist_util(OmegaConf.create(_ONE_PROCESS))
    model = GPT2StepModel(GPT2ForPreTraining(OmegaConf.create(_GPT2_SMALL)).eval())
    prompts = np.random.default_rng(0).integers(0, 50257, (batch, prompt)).tolist()
    options = GenerationOptions(max_new_tokens=tokens, eos_token_id=None)

    def step() -> None:
        generate(model, prompts, options)

    return step


def llama_train(batch: int, tokens: int) -> Step:
    """As LiBai's trainer runs it in eager mode."""
    dist.setup_dist_util(OmegaConf.create(_ONE_PROCESS))
    config = LLAMA_TABLE.read_config({"model_type": "llama", **LLAMA}, Path("benchmarks/items.py"))
    model = LlamaForPreTraining(config)
    place = {"placement": dist.get_layer_placement(0), "sbp": dist.get_hidden_sbp()}
    ids = flow.randint(0, LLAMA["vocab_size"], (batch, tokens), **place)
    return BOTH.train(BOTH.adamw(model), lambda: model(ids, ids)["lm_loss"])


MAKERS: dict[str, Maker] = {"gpt2_greedy": gpt2_greedy, "llama_train": llama_train}
