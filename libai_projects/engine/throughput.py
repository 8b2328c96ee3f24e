"""Speed of a training run, and its share of the hardware's peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oneflow_accel.backends.base import Backend

from libai.config import try_get_key
from omegaconf import DictConfig

from flow_train.metrics.peak import Utilization, peak_of
from libai_projects.weights.gpt2 import GPT2


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


def flops_per_token(model: DictConfig) -> float | None:
    """FLOPs of training one token of a GPT: 6 N + 12 L h T (Chowdhery et al., 2022, appendix B).

    N are the weights that are multiplied with (the layers, and the embedding once for the logits),
    L layers of width h, T tokens per sequence; attention is counted whole, not its causal half.
    """
    try:
        layers, hidden = int(model.num_layers), int(model.hidden_size)
        length = int(model.max_seq_length)
        rows = int(model.get("vocab_size_real") or model.vocab_size)
        # Norms and biases have one axis and are not part of a matrix product.
        matrices = [shape for shape in GPT2.block_shapes(model).values() if len(shape) > 1]
        weights = layers * sum(map(math.prod, matrices)) + rows * hidden
    except (AttributeError, KeyError, TypeError):
        return None
    return 6.0 * weights + 12.0 * layers * hidden * length


def of_run(cfg: DictConfig, backend: Backend, world_size: int, samples: int) -> Throughput:
    """The throughput of a run with `samples` sequences per iteration on `world_size` devices."""
    dataset: Any = try_get_key(cfg, "dataloader.train.dataset", default=None)
    first = dataset[0] if dataset else None
    tokens = first.get("max_seq_length") if first is not None else None
    half = try_get_key(cfg, "train.amp.enabled", default=False)
    model = try_get_key(cfg, "model.cfg", default=None)
    work = flops_per_token(model) if model is not None else None
    dtype = "float16" if half else "float32"
    return Throughput(backend, samples, tokens, work, dtype, world_size)
