"""Speed of a training run, and its share of the hardware's peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oneflow_accel.backends.base import Backend

from libai.config import try_get_key
from omegaconf import DictConfig

from flow_train.metrics.peak import Utilization, devices_of, peak_of
from libai_projects.engine.adapt import amp_precision
from libai_projects.models.families import table_of
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.llama import LLAMA
from libai_projects.weights.table import Table


@dataclass(frozen=True)
class Throughput:
    """What one iteration of a run does, on all processes together; None where unknown.

    `samples` are sequences per iteration, `tokens` tokens per sequence, `flops_per_token` those of
    training, and `dtype` is what the `devices` compute in.
    """

    backend: Backend
    samples: int
    tokens: int | None = None
    flops_per_token: float | None = None
    dtype: str = "float32"
    devices: int = 1

    @cached_property
    def utilization(self) -> Utilization | None:
        """The work beside the peak, which is measured once where the device's table has none."""
        if self.tokens is None or self.flops_per_token is None:
            return None
        peak = peak_of(self.backend, self.dtype)
        return Utilization(self.tokens * self.flops_per_token, peak, self.devices)

    def values(self, seconds: float) -> dict[str, float]:
        """Rates of iterations of so many seconds by the names of metrics.jsonl, without unknown
        ones."""
        rate, work = self.samples / seconds, self.utilization
        found = {
            "samples_per_second": rate,
            "tokens_per_second": None if self.tokens is None else self.tokens * rate,
            "mfu": None if work is None else work.percent(rate),
        }
        return {name: value for name, value in found.items() if value is not None}


def flops_per_token(model: DictConfig, table: Table = GPT2) -> float | None:
    """FLOPs of training one token: 6 N + 12 L h T (Chowdhery et al., 2022, appendix B).

    L layers whose heads are h wide together, T tokens per sequence; attention is counted whole, not
    its causal half. N are a GPT's weights that are multiplied with (the layers, and the embedding
    once for the logits), and all weights of a Llama, as people who train those count.
    """
    try:
        layers, length = int(model.num_layers), int(model.max_seq_length)
        width = int(model.hidden_size)
        if table is LLAMA:
            weights = table.count(model)
            width = table.derive(model)["query_size"]
        else:
            rows = int(model.get("vocab_size_real") or model.vocab_size)
            # Norms and biases have one axis and are not part of a matrix product.
            matrices = [shape for shape in table.block_shapes(model).values() if len(shape) > 1]
            weights = layers * sum(map(math.prod, matrices)) + rows * width
    except (AttributeError, KeyError, TypeError):
        return None
    return 6.0 * weights + 12.0 * layers * width * length


def of_run(cfg: DictConfig, backend: Backend, samples: int) -> Throughput:
    """The throughput of a run with `samples` sequences per iteration."""
    dataset: Any = try_get_key(cfg, "dataloader.train.dataset", default=None)
    first = dataset[0] if dataset else None
    tokens = first.get("max_seq_length") if first is not None else None
    model = try_get_key(cfg, "model.cfg", default=None)
    work = None
    if model is not None:
        work = flops_per_token(model, table_of(try_get_key(cfg, "model._target_")))
    dtype = amp_precision(cfg)
    dtype = "bfloat16" if dtype == "float32-bf16-products" else dtype
    return Throughput(backend, samples, tokens, work, dtype, devices_of(backend))
