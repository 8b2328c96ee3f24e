"""Speed, share of the hardware's peak, and memory of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from oneflow_accel.backends.base import Backend

from libai.config import try_get_key
from omegaconf import DictConfig

from libai_projects.weights.gpt2 import GPT2


@dataclass(frozen=True)
class Throughput:
    """What one iteration of a run does, on all processes together; None where unknown.

    `samples` are sequences per iteration, `tokens` tokens per sequence, and `peak_flops` FLOP/s of
    all devices of the run together.
    """

    backend: Backend
    samples: int
    tokens: int | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def describe(self, seconds: float) -> str:
        text = f"{self.samples / seconds:.4g} samples/s"
        if self.tokens is not None:
            text += f"  {self.samples * self.tokens / seconds:.5g} tokens/s"
        share = self.mfu(seconds)
        return f"{text}  mfu: {f'{100 * share:.1f} %' if share is not None else 'n/a'}"

    def rates(self, seconds: float) -> dict[str, float]:
        """The rates and the peak memory by the names of metrics.jsonl, without unknown ones."""
        tokens = None if self.tokens is None else self.samples * self.tokens / seconds
        found = {
            "samples_per_second": self.samples / seconds,
            "tokens_per_second": tokens,
            "mfu": self.mfu(seconds),
            "peak_memory_bytes": self.backend.max_memory_allocated(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilization: the model's FLOPs / (seconds x peak); None where unknown."""
        if None in (self.tokens, self.flops_per_token, self.peak_flops):
            return None
        work = self.samples * self.tokens * self.flops_per_token
        return work / (seconds * self.peak_flops)

    def describe_memory(self) -> str:
        peak = self.backend.max_memory_allocated()
        return f"peak memory: {f'{peak / 1e9:.2f} GB' if peak is not None else 'n/a'}"


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
    peak = backend.properties().peak_flops.get("float16" if half else "float32")
    model = try_get_key(cfg, "model.cfg", default=None)
    work = flops_per_token(model) if model is not None else None
    return Throughput(backend, samples, tokens, work, peak and peak * world_size)
