"""A module that has GPT-2's parameters under LiBai's names, and computes nothing."""

from __future__ import annotations

from typing import Any

import oneflow_accel  # noqa: F401

import numpy as np
import oneflow as flow
from oneflow import nn
from safetensors.numpy import load_file

from libai_projects.weights.gpt2 import GPT2
from tests.launch import REPOSITORY
from tests.libai_projects import reference_gpt2

# The model of tests/data/hf_gpt2.
CONFIG = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "max_seq_length": 24,
    "vocab_size": 61,
    "vocab_size_real": 61,
}


class ParametersOnly(nn.Module):
    """Modules nested as the names say, parameters of ones; sizes and vocab_size in `config`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        for full_name, shape in GPT2.shapes(config).items():
            *path, name = full_name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(name, nn.Parameter(flow.ones(*shape)))


def golden_state() -> dict[str, np.ndarray]:
    """tests/data/hf_gpt2 in LiBai's layout, by the tests' own mapping."""
    file = REPOSITORY / "tests" / "data" / "hf_gpt2" / "safetensors" / "model.safetensors"
    state = reference_gpt2.to_libai(load_file(file), 4)
    return {name: state[name] for name in GPT2.shapes(CONFIG)}
