"""A model one step at a time, for generation: numpy in, the logits of the last position out, under
every parallel layout. The protocol is `libai_projects.generation.interface.StepModel`.

The modules are those of training, with this process's part of the weights as local tensors: only
the sums over tensor parallelism and what goes to the next stage leave the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oneflow_accel import machine
from oneflow_accel.errors import UserError
from oneflow_accel.inference.huge_pages import use_huge_pages

import numpy as np
import oneflow as flow
from libai.layers import Embedding, LayerNorm, Linear, VocabEmbedding
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.models.layers import Hidden, Pair, Past, Projection, local_linear
from libai_projects.models.options import ModelOptions
from libai_projects.models.processes import BROADCAST, ROWS, Place, local, shares


@dataclass(frozen=True)
class LocalNorm:
    weight: flow.Tensor
    bias: flow.Tensor
    eps: float

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        shape = self.weight.shape
        return flow.nn.functional.layer_norm(x, shape, self.weight, self.bias, self.eps)


class LocalEmbedding:
    """Rows of an embedding that may be split over tensor parallelism; `place` None: it is whole."""

    def __init__(self, weight: flow.Tensor, place: Place | None = None) -> None:
        rows = shares(weight.shape[0], 1 if place is None else len(place.group))
        self._place = place if len(rows) > 1 else None
        self._weight = local(weight, BROADCAST if place is None else ROWS)
        self._first = 0 if place is None else sum(rows[: place.group.index(place.rank)])

    def __call__(self, ids: np.ndarray, _positions: np.ndarray | None = None) -> flow.Tensor:
        """(batch, time) int64 to (batch, time, width)."""
        weight, device = self._weight, self._weight.device
        if self._place is None:
            ids = flow.tensor(np.ascontiguousarray(ids), device=device)
            return flow._C.gather(weight, ids, axis=0)
        # Tokens of another process's rows are 0 here and come in with the sum.
        own = ids - self._first
        mine = (own >= 0) & (own < weight.shape[0])
        rows = flow._C.gather(weight, flow.tensor(np.where(mine, own, 0), device=device), axis=0)
        mine = flow.tensor(mine[..., None].astype(np.float32), device=device)
        return self._place.sum(rows * mine)


_LOCAL: tuple[tuple[type | tuple[type, ...], Callable[[nn.Module, Place], Any]], ...] = (
    ((Linear, Projection), local_linear),
    (LayerNorm, lambda module, _: LocalNorm(local(module.weight), local(module.bias), module.eps)),
    (VocabEmbedding, lambda module, place: LocalEmbedding(module.weight, place)),
    (Embedding, lambda module, _: LocalEmbedding(module.weight)),
    (nn.Dropout, lambda _module, _place: _identity),
)


def on_this_process(module: nn.Module, place: Place) -> Any:
    """One of LiBai's layers or of `layers`, or a module of such, on local tensors; collective. A
    model's own layer that has weights says itself what it becomes, in `on_this_process`."""
    if hasattr(type(module), "on_this_process"):
        return module.on_this_process()
    for kind, make in _LOCAL:
        if isinstance(module, kind):
            return make(module, place)
    part = object.__new__(type(module))
    part.__dict__.update(module.__dict__, _modules={})
    # Plain attributes, since the parts need not be modules.
    part.__dict__.update((name, on_this_process(x, place)) for name, x in module.named_children())
    return part


def _identity(x: flow.Tensor) -> flow.Tensor:
    return x


class KeyValueCache:
    """Keys and values of this stage's layers, (batch, heads, length, head size) each."""

    def __init__(self, batch_size: int, layers: int) -> None:
        self.batch_size = batch_size
        self.length = 0
        self.pairs: list[Pair | None] = [None] * layers

    def select(self, rows: np.ndarray) -> None:
        self.batch_size = len(rows)
        for layer, held in enumerate(self.pairs):
            if held is not None:
                index = flow.tensor(rows, dtype=flow.int64, device=held[0].device)
                key, value = (flow._C.gather(each, index, axis=0) for each in held)
                self.pairs[layer] = key, value


class TokenCache:
    """Tokens and positions, (batch, length) int64, to compute everything again at each step."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.ids = np.empty((batch_size, 0), dtype=np.int64)
        self.positions = self.ids

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    def extend(self, ids: np.ndarray, positions: np.ndarray) -> None:
        self.ids = np.concatenate([self.ids, ids], axis=1)
        self.positions = np.concatenate([self.positions, positions], axis=1)

    def select(self, rows: np.ndarray) -> None:
        self.ids, self.positions = self.ids[rows], self.positions[rows]
        self.batch_size = len(rows)


Cache = KeyValueCache | TokenCache


class StepModel:
    """A model that generation can step through; all processes call its methods alike.

    Tensor and pipeline parallelism share the work; data-parallel replicas repeat it. The modules
    are global, and their weights are read now: load them before.

    Args:
        embeddings: (tokens, positions) to (batch, time, width).
        layers: each (x, past) to the same shape; see `layers.Past`.
        head: (vocabulary, width), of the logits.
        key_width: numbers of a token's key in each layer; None: as many as of an embedding.
        options: the model's; logits have its real vocabulary, without padding rows.
        fused_softmax: whether one operator masks and normalizes scores.
    """

    def __init__(
        self,
        *,
        embeddings: nn.Module,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        head: flow.Tensor,
        options: ModelOptions,
        fused_softmax: bool,
        key_width: int | None = None,
    ) -> None:
        self.vocab_size, self.max_positions = options.real_vocabulary, options.max_seq_length
        self._place = place = Place.current()
        backend = dist.get_backend()
        self._device = backend.device()
        self._fused_softmax = fused_softmax
        rows, self._width = head.shape
        pair = 2 * (key_width or self._width) * np.dtype(np.float32).itemsize
        self.bytes_per_token = len(layers) * pair
        # Every process reads every weight: ZeRO may have left some to be joined, and OneFlow wants
        # all processes to take part in that. Weights of other stages are not kept.
        parts = [self._layer(on_this_process(layer, place)) for layer in layers]
        stage_of = dist.get_dist_util().get_layer_stage_id
        self._layers = [part for i, part in enumerate(parts) if stage_of(i) == place.stage]
        self._rows = shares(rows, len(place.group))
        self._embeddings = on_this_process(embeddings, place)
        self._norm = on_this_process(norm, place)
        declared = dist.get_nd_sbp([flow.sbp.broadcast, ROWS])
        last_stage = dist.get_layer_placement(-1)
        self._head = head.detach().to_global(placement=last_stage, sbp=declared).to_local()
        use_huge_pages(self._head)

    def _layer(self, layer: Any) -> Callable[[flow.Tensor, Past], flow.Tensor]:
        """What computes a layer that is on local tensors; a model may know a faster way."""
        return layer

    def _angles(self, first: int, time: int) -> Pair | None:
        """Cosines and sines, (time, head size / 2), of so many tokens from `first` on, for a model
        whose keys and queries are turned."""
        return None

    def free_memory(self) -> int | None:
        """Of the device, or of the machine where tensors are in its memory."""
        backend = dist.get_backend()
        if backend.supports("host_memory"):
            return machine.free_memory()
        total, used = backend.properties().total_memory, backend.memory_allocated()
        return None if total is None or used is None else max(0, total - used)

    def start(self, batch_size: int, use_cache: bool = True) -> Cache:
        """See `generation.interface.StepModel`, as for `step` and `select`."""
        return KeyValueCache(batch_size, len(self._layers)) if use_cache else TokenCache(batch_size)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Cache
    ) -> np.ndarray:
        """The logits are the same on every process. Raises UserError for a token or position that
        the model lacks, ValueError for shapes that do not fit."""
        ids, positions = np.asarray(ids), np.asarray(positions)
        if mask is not None and mask.shape[-1] >= ids.shape[-1] and len(mask) == len(ids):
            new = mask[:, mask.shape[1] - ids.shape[1] :]
            ids, positions = np.where(new, ids, 0), np.where(new, positions, 0)
        self._check(ids, positions, mask, cache)
        if isinstance(cache, TokenCache):
            cache.extend(ids, positions)
            ids, positions = cache.ids, cache.positions
            cache = KeyValueCache(cache.batch_size, len(self._layers))
        hidden = None
        if mask is not None and not mask.all():
            hidden = Hidden(mask, ids.shape[1], self._device, self._fused_softmax)
        with flow.no_grad():
            logits = self._forward(ids, positions, hidden, cache)
            return logits.numpy()[:, : self.vocab_size]

    def select(self, cache: Cache, rows: np.ndarray) -> None:
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) != cache.batch_size or (rows != np.arange(len(rows))).any():
            cache.select(rows)

    def _forward(
        self, ids: np.ndarray, positions: np.ndarray, hidden: Hidden | None, cache: KeyValueCache
    ) -> flow.Tensor:
        place, batch, time = self._place, *ids.shape
        if place.is_first_stage:
            x = self._embeddings(ids, positions)
        else:
            like = flow.empty(0, dtype=flow.float32, device=self._device)
            x = place.from_previous_stage((batch, time, self._width), like)
        angles = self._angles(cache.length, time)
        for index, layer in enumerate(self._layers):
            x = layer(x, Past(cache.pairs, index, hidden, angles))
        cache.length += time
        if not place.is_last_stage:
            place.to_next_stage(x)
            return place.share(flow.empty(batch, sum(self._rows), dtype=x.dtype, device=x.device))
        last = x if time == 1 else flow._C.narrow(x, 1, time - 1, 1)
        part = flow._C.matmul(self._norm(last).reshape(batch, -1), self._head, transpose_b=True)
        return place.share(place.join(part, self._rows))

    def _check(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Cache
    ) -> None:
        if ids.ndim != 2 or ids.shape[1] == 0 or ids.shape[0] != cache.batch_size:
            raise ValueError(f"ids of {ids.shape} are not ({cache.batch_size}, at least 1)")
        if positions.shape != ids.shape:
            raise ValueError(f"positions of {positions.shape} for ids of {ids.shape}")
        total = cache.length + ids.shape[1]
        if mask is not None and mask.shape != (len(ids), total):
            raise ValueError(f"the mask of {mask.shape} is not {(len(ids), total)}")
        for name, values, limit, what in (
            ("token", ids, self.vocab_size, "the vocabulary has"),
            ("position", positions, self.max_positions, "the model has"),
        ):
            if values.size and not 0 <= int(values.min()) <= int(values.max()) < limit:
                worst = int(values.max()) if values.max() >= limit else int(values.min())
                raise UserError(
                    f"{name} {worst} does not exist: {what} {limit} {name}s"
                    + (": shorten the prompt or ask for fewer tokens" if name[0] == "p" else "")
                )
