"""What LiBai's models are trained for: their own losses, and the evaluator of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.agree import on_rank_0
from oneflow_accel.backends.base import Backend

import oneflow as flow
from libai.data.structures import DistTensorData
from libai.engine import DefaultTrainer
from libai.evaluation import DatasetEvaluator
from libai.utils import distributed as dist
from oneflow import nn

from flow_train.task import Batch, Figure, Sum, Task, Tensors
from libai_projects.text.perplexity import evaluate_on

# LiBai's names of splits and of results, and those in metrics.jsonl.
SPLITS = {"validation": "val"}
RESULTS = {
    "lm_loss": "loss",
    "lm_loss_PPL": "perplexity",
    "lm_loss_tokens": "tokens",
    "lm_loss_accuracy": "accuracy",
}
THEIR_SPLITS, THEIR_RESULTS = (
    {ours: theirs for theirs, ours in names.items()} for names in (SPLITS, RESULTS)
)


def metric_of(name: str) -> str:
    """What train.evaluation.eval_metric names, as "val/perplexity"; of validation, without a
    split."""
    split, _, result = name.rpartition("/")
    split = split or "validation"
    return f"{SPLITS.get(split, split)}/{RESULTS.get(result, result)}"


class Loader:
    """A loader of LiBai's by the protocol of `flow_train`: `batches` of them are the run, and it
    begins where its sampler does.

    Args:
        batch_size: samples of a batch, of this process; `global_batch_size` those of all.
    """

    def __init__(self, loader: Any, batches: int, batch_size: int, replicas: int) -> None:
        self.loader, self._batches = loader, batches
        self.batch_size, self.global_batch_size = batch_size, batch_size * replicas

    def __len__(self) -> int:
        return self._batches

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """There is one epoch, and the sampler knows what is consumed."""

    def __iter__(self) -> Iterator[Any]:
        for data in self.loader:
            if isinstance(data, flow.utils.data._utils.worker.ExceptionWrapper):
                data.reraise()
            mix = getattr(self.loader, "mixup_func", None)
            if mix is not None:
                images, labels = data.get("images"), data.get("labels")
                images.tensor, labels.tensor = mix(images.tensor, labels.tensor)
            yield data


@dataclass(frozen=True)
class Results:
    """What an evaluator found, by LiBai's names."""

    values: Mapping[str, float]

    def as_logged(self) -> dict[str, float]:
        return {RESULTS.get(name, name): value for name, value in self.values.items()}

    def __str__(self) -> str:
        return " ".join(f"{name} {value:.6g}" for name, value in self.as_logged().items())


def _perplexity(total: float, count: float) -> float:
    return math.exp(min(total / count, 50.0))


class LibaiTask(Task):
    """The sum of a LiBai model's losses, each a figure of its own where there are several, and of
    sequences of `tokens` the perplexity.

    Args:
        evaluator: makes the config's; it takes batches of `batch_size` rows of all processes,
            `batches` at most of each split.
        macs: of the forward pass of a token, of the layers as they are now; None where that is not
            known.
    """

    samples = "samples"
    inputs = ()

    def __init__(
        self,
        tokens: int | None,
        macs: Callable[[], float | None],
        evaluator: Callable[[], DatasetEvaluator],
        batch_size: int,
        batches: int,
    ) -> None:
        self._tokens, self._macs = tokens, macs
        self._evaluator, self._batch_size, self._batches = evaluator, batch_size, batches
        # How each field of a batch lies on the processes, from the first batch on.
        self._forms: dict[str, tuple[list[str], int]] = {}
        self.unit = "samples" if tokens is None else "tokens"  # type: ignore[misc]
        figure = Figure("perplexity", "PPL", "8.3f", _perplexity)
        self.figures = {} if tokens is None else {"perplexity": figure}  # type: ignore[misc]

    def loss(self, model: nn.Module, batch: Tensors) -> tuple[flow.Tensor, dict[str, Sum]]:
        return self.total(model(**batch))

    def total(self, losses: Mapping[str, flow.Tensor]) -> tuple[flow.Tensor, dict[str, Sum]]:
        """What is trained by, of what a model in training returns."""
        total = sum(losses.values())
        of_tokens = losses.get("lm_loss", total)
        sums = {} if self._tokens is None else {"perplexity": Sum(of_tokens.detach(), 1)}
        if len(losses) > 1:
            for name, value in losses.items():
                self.figures.setdefault(  # type: ignore[attr-defined]
                    name, Figure(name, name, ".4g", lambda value, count: value / count)
                )
                sums[name] = Sum(value.detach(), 1)
        return total, sums

    def sums(self, model: nn.Module, batch: Tensors, given: Any) -> dict[str, Sum]:
        raise NotImplementedError("LiBai's evaluators do it")

    def units(self, batch: Batch) -> int:
        return self.size(batch) * (self._tokens or 1)

    def size(self, batch: Batch) -> int:
        return len(next(iter(batch.values())))

    def arrays(self, batch: Any) -> Batch:
        fields: Mapping[str, DistTensorData] = batch.get_fields()
        if not self._forms:
            self._forms = {n: (data.sbp_list, data.placement_idx) for n, data in fields.items()}
        return {name: data.tensor.numpy() for name, data in fields.items()}

    def laid_out(self, batch: Batch) -> dict[str, flow.Tensor]:
        """The global tensors of which each process has its share, where LiBai has them."""
        found = {}
        for name, array in batch.items():
            data = DistTensorData(flow.tensor(array), *self._forms[name])
            data.to_global()
            found[name] = data.tensor
        return found

    def macs_per_unit(self, model: nn.Module, batch: Batch, backend: Backend) -> float:
        return self.macs(model)

    def macs(self, model: nn.Module) -> float:
        return self._macs() or 0.0

    def evaluate(self, model: Any, loader: Any, *_: Any, **options: Any) -> Any:
        """`model` is LiBai's or its graph for evaluation."""
        most, most_of_call = self._batches, options.get("max_batches")
        found = evaluate_on(
            model,
            loader.loader,
            self._batch_size,
            most if most_of_call is None else min(most, most_of_call),
            DefaultTrainer.get_batch,
            self._evaluator(),
        )
        return Results(on_rank_0(lambda: {name: float(value) for name, value in found.items()}))

    def named(self, values: Mapping[str, float], split: str) -> dict[str, float]:
        return {f"{split}/{name}": value for name, value in values.items()}


def replicas() -> int:
    """How many processes have samples of their own."""
    return int(dist.get_data_parallel_size())
