"""A model one step at a time, for generation: numpy in, logits out, under every parallel layout.
The protocol is `generation.interface.StepModel`.

What a model does with tokens is in `decoder`; here are the cache of keys and values, and the way
through the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from oneflow_accel import machine
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import (
    PAGE,
    CacheDtype,
    PagedAttention,
    WeightsDtype,
    new_pages,
)

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist

from libai_projects.models.decoder import DecoderLayer, LinearLayer, LocalLayers
from libai_projects.models.pages import PagedCache, Step
from libai_projects.models.processes import ROWS, Place, shares

Pair = tuple[flow.Tensor, flow.Tensor]


@dataclass
class Cache:
    """Sequences that a model is reading: which pages they have, and the keys and values in them of
    each of this stage's layers. Process 0 alone needs the former, if it tells the others steps."""

    pages: PagedCache
    tensors: list[Pair]

    def grow(self, pages: int) -> None:
        """Tensors of at least so many pages; what is written stays."""
        there = len(self.tensors[0][0]) if self.tensors else pages
        if pages <= there:
            return
        # Twice as many, so that growing copies each page a few times at most.
        pages = max(pages, 2 * there)
        if self.pages.capacity is not None:
            pages = min(pages, self.pages.capacity)
        for layer, pair in enumerate(self.tensors):
            grown = []
            for old in pair:
                new = flow.zeros(pages, *old.shape[1:], dtype=old.dtype, device=old.device)
                if there:
                    new[:there] = old
                grown.append(new)
            self.tensors[layer] = (grown[0], grown[1])


class StepModel:
    """A model that generation can step through; all processes call its methods alike.

    Tensor and pipeline parallelism share the work; data-parallel replicas repeat it. The modules
    are global, and their weights are read now: load them before.

    Args:
        model: has `options`, `layers`, of which `_products` makes what computes them, the last
            `norm`, and a `head_weight`, of which logits leave out the padding rows.
        weights_dtype: what the weights of linear layers are rounded to.
        cache_dtype: what keys and values are rounded to; None: float32 beside float32 weights,
            else bfloat16.
    """

    shares_prefixes = True
    """Whether sequences that begin alike have the same keys there."""

    def __init__(
        self,
        model: Any,
        *,
        weights_dtype: WeightsDtype = "float32",
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        for name, value, kinds in (
            ("weights_dtype", weights_dtype, get_args(WeightsDtype)),
            ("cache_dtype", cache_dtype, (*get_args(CacheDtype), None)),
        ):
            if value not in kinds:
                raise UserError(f"{name} {value!r}: choose one of {', '.join(filter(None, kinds))}")
        self._options = options = model.options
        self.vocab_size, self.max_positions = options.real_vocabulary, options.max_seq_length
        self._place = place = Place.current()
        self._device = dist.get_backend().device()
        if cache_dtype is None:
            cache_dtype = "float32" if weights_dtype == "float32" else "bfloat16"
        key_heads = options.num_key_value_heads // len(place.group)
        kept = key_heads, options.head_size, cache_dtype, self._device
        self._new_pages = lambda pages: new_pages(pages, *kept)
        numbers = sum(tensor.nelement() for tensor in self._new_pages(1))
        # Of all processes together, which may share a machine's memory.
        numbers *= len(place.group) * options.num_layers
        self.page_bytes = numbers * (4 if cache_dtype == "float32" else 2)
        self.bytes_per_token = self.page_bytes // PAGE
        head = model.head_weight().detach()
        rows, self._width = head.shape
        # Every process reads every weight: ZeRO may have left some to be joined, and OneFlow wants
        # all processes to take part in that. Weights of other stages are not kept.
        make = LocalLayers(place, self._device, weights_dtype)
        stage_of = dist.get_dist_util().get_layer_stage_id
        self._layers: list[DecoderLayer] = []
        for index, block in enumerate(model.layers):
            first = make.norm(block.input_layernorm)
            second = make.norm(block.post_attention_layernorm)
            products = self._products(block, make)
            attention = PagedAttention(
                heads=options.num_attention_heads // len(place.group),
                scale=block.self_attention.scale,
                interleaved=getattr(options, "rope_interleaved", False),
            )
            if stage_of(index) == place.stage:
                self._layers.append(DecoderLayer(attention, first, second, *products))
        self._rows = shares(rows, len(place.group))
        self._norm = make.norm(model.norm)
        declared = dist.get_nd_sbp([flow.sbp.broadcast, ROWS])
        last_stage = dist.get_layer_placement(-1)
        mine = head.to_global(placement=last_stage, sbp=declared).to_local()
        self._head = make.packed(mine.numpy())

    def _products(self, block: Any, make: LocalLayers) -> list[LinearLayer]:
        """What `DecoderLayer` has of a block: query_key_value, dense, inner and outer."""
        raise NotImplementedError

    def _embed(self, ids: np.ndarray, positions: np.ndarray) -> flow.Tensor:
        """(T,) each to (T, width)."""
        raise NotImplementedError

    def _angles(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """Cosines and sines, (T, head size / 2) float32, for a model whose keys and queries are
        turned."""
        return None

    def free_memory(self) -> int | None:
        """Of the device, or of the machine where tensors are in its memory."""
        backend = dist.get_backend()
        if backend.supports("host_memory"):
            return machine.free_memory()
        total, used = backend.properties().total_memory, backend.memory_allocated()
        return None if total is None or used is None else max(0, total - used)

    def new_cache(self, pages: int | None = None) -> Cache:
        """An empty cache, of at most so many pages; its tensors grow to what is used."""
        return Cache(PagedCache(pages), [self._new_pages(0) for _ in self._layers])

    def plan(self, cache: Cache, rows: Sequence[tuple[int, Sequence[int]]]) -> Step:
        """The step that reads the next tokens, at least one, of each sequence, by its number, and
        gives the logits after the last one. Raises UserError where there
        are not enough pages, before anything has changed."""
        pages = cache.pages
        needed = pages.pages_needed({number: len(tokens) for number, tokens in rows})
        if needed > pages.free:
            raise UserError(
                f"the key-value cache has {pages.free} pages left and the next tokens need {needed}"
            )
        positions = []
        for number, tokens in rows:
            first = pages.length(number)
            pages.extend(number, len(tokens))
            positions.append(np.arange(first, first + len(tokens), dtype=np.int32))
        counts = [len(tokens) for _, tokens in rows]
        return Step(
            ids=np.concatenate([np.asarray(tokens, np.int64) for _, tokens in rows]),
            positions=np.concatenate(positions),
            sequences=np.repeat(np.arange(len(rows), dtype=np.int32), counts),
            tables=pages.tables([number for number, _ in rows]),
            copies=pages.take_copies(),
            last=np.cumsum(counts) - 1,
        )

    def run(self, step: Step, cache: Cache) -> np.ndarray:
        """Read the step's tokens, which the model has: (R, vocab_size) float32 logits, the same on
        every process."""
        cache.grow(1 + max(int(part.max(initial=-1)) for part in (step.tables, step.copies)))
        with flow.no_grad():
            logits = self._forward(step, cache).numpy()[:, : self.vocab_size]
        return np.require(logits, requirements=["C", "W"])

    def _forward(self, step: Step, cache: Cache) -> flow.Tensor:
        place, device = self._place, self._device
        if place.is_first_stage:
            x = self._embed(step.ids, step.positions)
        else:
            like = flow.empty(0, dtype=flow.float32, device=device)
            x = place.from_previous_stage((len(step.ids), self._width), like)
        arrays: list[np.ndarray | None] = [step.tables, step.sequences, step.positions]
        arrays.append(step.copies if len(step.copies) else None)
        arrays += self._angles(step) or (None, None)
        places = [None if a is None else flow.tensor(a, device=device) for a in arrays]
        for layer, pair in zip(self._layers, cache.tensors, strict=True):
            x = layer(x, *pair, places)
        if not place.is_last_stage:
            place.to_next_stage(x)
        nothing = flow.empty(len(step.last), sum(self._rows), dtype=x.dtype, device=device)
        if len(step.last) == 0:
            return nothing
        if not place.is_last_stage:
            return place.share(nothing)
        if len(step.last) < len(step.ids):
            x = flow._C.gather(x, flow.tensor(step.last, device=device), axis=0)
        return place.share(place.join(self._head(x, norm=self._norm), self._rows))
