"""Speed of a training run, and its share of the hardware's peak."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oneflow_accel.backends.base import Backend

from libai.config import try_get_key
from omegaconf import DictConfig

from flow_train.metrics.peak import Utilization, devices_of, peak_of
from libai_projects.engine.adapt import amp_precision
from libai_projects.models.families import table_of


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


def of_run(cfg: DictConfig, backend: Backend, samples: int) -> Throughput:
    """The throughput of a run with `samples` sequences per iteration."""
    dataset: Any = try_get_key(cfg, "dataloader.train.dataset", default=None)
    first = dataset[0] if dataset else None
    tokens = first.get("max_seq_length") if first is not None else None
    model = try_get_key(cfg, "model.cfg", default=None)
    work = None
    # Another model may have other names for its sizes.
    with suppress(AttributeError, KeyError, TypeError):
        work = table_of(try_get_key(cfg, "model._target_")).flops_per_token(model)
    dtype = amp_precision(cfg)
    dtype = "bfloat16" if dtype == "float32-bf16-products" else dtype
    return Throughput(backend, samples, tokens, work, dtype, devices_of(backend))
