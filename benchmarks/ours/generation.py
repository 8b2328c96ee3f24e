"""Greedy decoding of GPT-2 small with MagicPrompt's model, as its pipeline runs it."""

from __future__ import annotations

import numpy as np
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from benchmarks.serve import Maker, Step
from libai_projects.generation import GenerationOptions, generate
from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel

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


MAKERS: dict[str, Maker] = {"gpt2_greedy": gpt2_greedy}
