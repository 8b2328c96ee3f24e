"""Evaluation of a LiBai model, and the perplexity of a language model by tokens."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from oneflow_accel import agree, distributed

import numpy as np
import oneflow as flow
from libai import evaluation

logger = logging.getLogger("libai_projects")

Fields = dict[str, Any]


def evaluate_on(
    model: Any,
    loader: Any,
    batch_size: int,
    max_batches: int,
    get_batch: Callable[[Any], Fields],
    evaluator: evaluation.DatasetEvaluator,
) -> Fields:
    """Evaluate a model as LiBai's `inference_on_dataset` does, at most `max_batches` batches.

    An evaluator may have two more methods, both called on all processes: `model_inputs(module,
    inputs)` says what to call the model with, by default all fields of the batch; `reduce(inputs,
    outputs)` computes on the devices what `process` needs, so that only this goes to the main
    process.

    `batch_size` counts the rows of all processes; the samplers of `text.loaders` put what fills up
    the last batch at its end. `get_batch` makes global tensors by field. Returns the results on the
    main process, {} on others; the model is afterwards in the mode it was in.
    """
    is_graph = isinstance(model, flow.nn.Graph)
    module = model.model.to(flow.nn.Module) if is_graph else model
    # LiBai's wrapper of several evaluators has them in a list.
    parts = getattr(evaluator, "_evaluators", [evaluator])
    evaluator.reset()
    samples, began = len(loader.dataset), time.perf_counter()
    switched = model.model if is_graph else model
    trained = switched.training
    switched.eval()
    batches = rows = 0
    try:
        with flow.no_grad():
            for data in itertools.islice(loader, max_batches):
                inputs = _filled_up(get_batch(data), batch_size)
                given, outputs = inputs, {}
                for part in parts:
                    if hasattr(part, "model_inputs"):
                        given = part.model_inputs(module, given)
                found = model(**given)
                for part in parts:
                    outputs |= part.reduce(inputs, found) if hasattr(part, "reduce") else found
                count = min(batch_size, samples - rows)
                local_inputs = {key: agree.whole(value) for key, value in inputs.items()}
                local_outputs = {key: agree.whole(value) for key, value in outputs.items()}
                if distributed.is_main():
                    evaluator.process(
                        {key: value[:count] for key, value in local_inputs.items()},
                        # The loss of a whole batch has no rows.
                        {k: v[:count] if v.ndim > 1 else v for k, v in local_outputs.items()},
                    )
                batches, rows = batches + 1, rows + count
    finally:
        switched.train(trained)
    seconds = (time.perf_counter() - began) / max(1, batches)
    logger.info("evaluated %d samples, %.4f s for each batch of %d", rows, seconds, batch_size)
    return evaluator.evaluate() or {}


def _filled_up(fields: Fields, batch_size: int) -> Fields:
    """The fields with rows of zeros up to a whole batch: an nn.Graph needs batches of one size."""
    filled = {}
    for key, value in fields.items():
        lacking = batch_size - value.shape[0]
        if lacking > 0:
            whole = [flow.sbp.broadcast] * len(value.sbp)
            zeros = flow.zeros(
                (lacking, *value.shape[1:]), dtype=value.dtype, placement=value.placement, sbp=whole
            )
            rows = flow.cat([value.to_global(sbp=whole), zeros], dim=0)
            value = rows.to_global(sbp=value.sbp)
        filled[key] = value
    return filled


class PPLEvaluator(evaluation.PPLEvaluator):
    """Perplexity of a language model on all evaluated tokens: exp of the mean of their losses, each
    token counting alike, and rows that only fill up a batch not at all.

    What a model returns in evaluation mode can be:

    1. {"token_losses": (B, T), "token_mask": (B, T)}, where its class says so by
    `returns_token_losses`: losses in nats, and a mask that is not 0 where a token counts (by
    default: labels >= 0).

    2. {"prediction_scores": (B, T, V)}, as of LiBai's GPT, called without the field `labels`.

    3. Mean losses as scalars, as of LiBai's BERT and T5: exp of their mean over batches, padded
    rows included, named `{key}_PPL`.

    Results of the first two: `lm_loss_PPL`, `lm_loss` (the mean) and `lm_loss_tokens` (how many
    count); also the share of what is 1 in `token_hits` (B, T), among tokens that count, as
    `lm_loss_accuracy`, and in `order_hits` (B, 1) as `order_accuracy`, where a model returns them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._loss_sum, self._tokens = 0.0, 0
        self._hits: dict[str, list[np.ndarray]] = {}
        # By the name of the loss: sums over batches of loss times rows, and of rows.
        self._batch_losses: dict[str, tuple[float, int]] = {}

    def model_inputs(self, module: flow.nn.Module, inputs: Fields) -> Fields:
        if getattr(module, "returns_token_losses", False) or "labels" not in inputs:
            return inputs
        parameter = inspect.signature(module.forward).parameters.get("labels")
        if parameter is None or parameter.default is inspect.Parameter.empty:
            return inputs
        return {key: value for key, value in inputs.items() if key != "labels"}

    def reduce(self, inputs: Fields, outputs: Fields) -> Fields:
        if "token_losses" in outputs:
            keys = "token_losses", "token_mask", "token_hits", "order_hits"
            return {key: outputs[key] for key in keys if key in outputs}
        if "prediction_scores" in outputs and "labels" in inputs:
            logits = outputs["prediction_scores"]
            labels = inputs["labels"].to_global(placement=logits.placement)
            losses = flow._C.sparse_softmax_cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                # The operator takes no labels below 0; their losses do not count, see `process`.
                flow.clamp(labels, min=0).reshape(-1),
            )
            return {"token_losses": losses.reshape(*labels.shape)}
        return outputs

    def process(self, inputs: Fields, outputs: Fields) -> None:
        if "token_losses" in outputs:
            losses = outputs["token_losses"].numpy().astype(np.float64)
            if "token_mask" in outputs:
                mask = outputs["token_mask"].numpy() != 0
            elif "labels" in inputs:
                mask = inputs["labels"].numpy() >= 0
            else:
                mask = np.ones(losses.shape, dtype=bool)
            self._loss_sum += float(losses[mask].sum())
            self._tokens += int(mask.sum())
            if "token_hits" in outputs:
                hits = outputs["token_hits"].numpy()[mask]
                self._hits.setdefault("lm_loss_accuracy", []).append(hits)
            if "order_hits" in outputs:
                order = outputs["order_hits"].numpy().ravel()
                self._hits.setdefault("order_accuracy", []).append(order)
            return
        rows = len(next(iter(inputs.values())))
        for key, value in outputs.items():
            if value.numel() != 1:
                continue
            if key not in self._batch_losses:
                logger.warning(
                    "%s is the mean of a batch: its perplexity is approximate where rows have "
                    "different numbers of tokens or the last batch is padded",
                    key,
                )
            total, count = self._batch_losses.get(key, (0.0, 0))
            self._batch_losses[key] = (total + float(value.item()) * rows, count + rows)

    def evaluate(self) -> dict[str, float]:
        if flow.env.get_rank() != 0:
            return {}
        results: dict[str, float] = {}
        if self._tokens:
            mean = self._loss_sum / self._tokens
            results = {"lm_loss_PPL": _exp(mean), "lm_loss": mean, "lm_loss_tokens": self._tokens}
        for key, hits in self._hits.items():
            results[key] = float(np.concatenate(hits).mean())
        for key, (total, rows) in self._batch_losses.items():
            results[f"{key}_PPL"] = _exp(total / rows)
        return results


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
