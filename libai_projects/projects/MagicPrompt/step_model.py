"""GPT-2 one step at a time, for generation: numpy in, the logits of the last position out, under
every parallel layout. The protocol is `libai_projects.generation.interface.StepModel`."""

from __future__ import annotations

from oneflow_accel.errors import UserError
from oneflow_accel.inference.huge_pages import use_huge_pages

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist

from libai_projects.projects.MagicPrompt.cache import KeyValueCache, TokenCache
from libai_projects.projects.MagicPrompt.communication import Position
from libai_projects.projects.MagicPrompt.gpt2 import GPT2ForPreTraining, GPT2Model
from libai_projects.projects.MagicPrompt.linear_shards import ROWS, local
from libai_projects.projects.MagicPrompt.shards import Hidden, LayerShard, Norm

Cache = KeyValueCache | TokenCache


class GPT2StepModel:
    """A GPT-2 that generation can step through.

    All processes of the run call the same methods with the same arguments, and get the same
    results. Tensor and pipeline parallelism share the work; data-parallel replicas repeat it.

    Args:
        model: the global model. Its weights are read now: load them before.

    Attributes:
        vocab_size: columns of the logits: the real vocabulary, without padding rows.
        max_positions: longest sequence.
        bytes_per_token: of this machine's memory that keys and values of a token take, over all
            stages and shards; 0 on devices with a memory of their own.
    """

    def __init__(self, model: GPT2ForPreTraining | GPT2Model) -> None:
        gpt = model.GPT_model if isinstance(model, GPT2ForPreTraining) else model
        options = gpt.options
        self.vocab_size = options.real_vocabulary
        self.max_positions = options.max_seq_length
        self._position = Position.current()
        backend = dist.get_backend()
        self._device = backend.device()
        self._fused_softmax = bool(options.scale_mask_softmax_fusion)
        self._width = options.hidden_size
        pair = 2 * options.hidden_size * np.dtype(np.float32).itemsize
        self.bytes_per_token = options.num_layers * pair if backend.name == "cpu" else 0
        # Every process reads every weight: ZeRO may have left some to be joined, and OneFlow wants
        # all processes to take part in that. Of another stage's weights nothing is left to keep.
        layers = [LayerShard(each, options, self._position) for each in gpt.transformer.layers]
        stage_of = dist.get_dist_util().get_layer_stage_id
        self._layers = [
            shard for i, shard in enumerate(layers) if stage_of(i) == self._position.stage
        ]
        self._rows = _shares(options.vocab_size, len(self._position.group))
        self._first_row = sum(self._rows[: self._position.group.index(self._position.rank)])
        weight = gpt.embeddings.token_embeddings.weight
        self._tokens = local(weight, ROWS)
        self._positions = local(gpt.embeddings.position_embeddings.weight)
        self._norm = Norm.of(gpt.transformer.layernorm_f)
        declared = dist.get_nd_sbp([flow.sbp.broadcast, ROWS])
        last_stage = dist.get_layer_placement(-1)
        self._head = weight.detach().to_global(placement=last_stage, sbp=declared).to_local()
        use_huge_pages(self._head)

    def start(self, batch_size: int, use_cache: bool = True) -> Cache:
        """An empty cache for `batch_size` sequences.

        Args:
            batch_size: rows.
            use_cache: keep keys and values; False keeps the tokens and computes all of them at
                every step.
        """
        return KeyValueCache(batch_size, len(self._layers)) if use_cache else TokenCache(batch_size)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, cache: Cache
    ) -> np.ndarray:
        """Append tokens and compute what comes after them.

        Args:
            ids: (batch, new) int64 tokens since the last call; what stands for padding does not
                matter.
            positions: (batch, new) int64, the position of each; likewise.
            mask: (batch, tokens so far, these included) bool, False for padding, which stands on
                the left; None where there is none.
            cache: of `start`.

        Returns:
            (batch, vocab_size) float32, on every process the same.

        Raises:
            UserError: a token or a position that the model does not have.
            ValueError: shapes that do not fit.
        """
        ids, positions = np.asarray(ids), np.asarray(positions)
        if mask is not None and mask.shape[-1] >= ids.shape[-1] and len(mask) == len(ids):
            new = mask[:, mask.shape[1] - ids.shape[1] :]
            ids, positions = np.where(new, ids, 0), np.where(new, positions, 0)
        self._check(ids, positions, mask, cache)
        if isinstance(cache, TokenCache):
            cache.extend(ids, positions)
            ids, positions = cache.ids, cache.positions
            cache = self.start(cache.batch_size)
        hidden = None
        if mask is not None and not mask.all():
            hidden = Hidden(mask, ids.shape[1], self._device, self._fused_softmax)
        with flow.no_grad():
            logits = self._forward(ids, positions, hidden, cache)
            return logits.numpy()[:, : self.vocab_size]

    def select(self, cache: Cache, rows: np.ndarray) -> None:
        """Keep, reorder or repeat sequences.

        Args:
            cache: of `start`; changed in place.
            rows: (new batch,) int, which row each new one was.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) != cache.batch_size or (rows != np.arange(len(rows))).any():
            cache.select(rows)

    def _forward(
        self, ids: np.ndarray, positions: np.ndarray, hidden: Hidden | None, cache: KeyValueCache
    ) -> flow.Tensor:
        place, batch, time = self._position, *ids.shape
        if place.is_first_stage:
            x = self._embed(ids, positions)
        else:
            like = self._layers[0].post_norm.bias
            x = place.from_previous_stage((batch, time, self._width), like)
        for index, layer in enumerate(self._layers):
            x = layer(x, index, cache, hidden)
        cache.length += time
        if not place.is_last_stage:
            place.to_next_stage(x)
            return place.share(flow.empty(batch, sum(self._rows), dtype=x.dtype, device=x.device))
        last = x if time == 1 else flow._C.narrow(x, 1, time - 1, 1)
        part = flow._C.matmul(self._norm(last).reshape(batch, -1), self._head, transpose_b=True)
        return place.share(place.join(part, self._rows))

    def _embed(self, ids: np.ndarray, positions: np.ndarray) -> flow.Tensor:
        if len(self._rows) == 1:
            tokens = flow._C.gather(self._tokens, self._put(ids), axis=0)
        else:
            # Tokens of another process's rows are 0 here and come in with the sum.
            own = ids - self._first_row
            mine = (own >= 0) & (own < self._tokens.shape[0])
            tokens = flow._C.gather(self._tokens, self._put(np.where(mine, own, 0)), axis=0)
            tokens = self._position.sum(tokens * self._put(mine[..., None].astype(np.float32)))
        return tokens + flow._C.gather(self._positions, self._put(positions), axis=0)

    def _put(self, values: np.ndarray) -> flow.Tensor:
        return flow.tensor(np.ascontiguousarray(values), device=self._device)

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


def _shares(rows: int, processes: int) -> tuple[int, ...]:
    """How OneFlow splits an axis: evenly, the first ones get what is left over."""
    each, more = divmod(rows, processes)
    return tuple(each + (index < more) for index in range(processes))
