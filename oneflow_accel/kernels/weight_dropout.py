"""Dropout of attention's weights, and of rows beside a norm: which a seed keeps, and seeds.

The kernels draw the same numbers (`csrc/attention/weight_dropout.h`): Philox 4x32-10 (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as its
key. A weight takes 16 bits: that of (batch, head, query, key) takes, of the counter
(key // 128 * 16 + key % 32 // 2, query, head, batch), the word key % 64 // 32 * 2 + key % 2, and
its lower half where key % 128 < 64.
"""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Two of them may be added.
_SEEDS = 2**62


def draw_seed(like: flow.Tensor) -> flow.Tensor:
    """A seed for one call of attention, int64 of shape (1,), from OneFlow's default generator of
    the CPU: on the device of `like` or, if that is global, broadcast over its placement.

    In an nn.Graph the seed is another one in each step, and for each call of this function.
    """
    if not like.is_lazy:
        # An operator that draws, and waits for none, would overtake a dropout before it that waits
        # for another process, and one of global tensors would overtake this one: what each draws
        # would depend on the time.
        flow._oneflow_internal.eager.Sync()
        seed = flow.randint(0, _SEEDS, (1,), dtype=flow.int64)
        flow._oneflow_internal.eager.Sync()
        if like.is_global:
            # Of the placement's first process, whatever the others have drawn: as a sum, since
            # OneFlow sends no copies where a block is computed again in the backward pass.
            if flow.env.get_rank() != like.placement.ranks.flatten()[0]:
                seed = flow.zeros_like(seed)
            parts = [flow.sbp.partial_sum] * len(like.sbp)
            seed = seed.to_global(placement=like.placement, sbp=parts)
            return seed.to_global(sbp=_broadcast(like))
        return seed.to(like.device)
    # All random operators of a graph have one seed, so each call adds a number drawn now.
    with flow._oneflow_internal.lazy_mode.guard(False):
        number = flow.randint(0, _SEEDS, (1,), dtype=flow.int64).item()
    place = (
        {"placement": like.placement, "sbp": _broadcast(like)}
        if like.is_global
        else {"device": like.device}
    )
    return flow.randint(0, _SEEDS, (1,), dtype=flow.int64, **place) + number


def checked_seed(dropout: float, seed: flow.Tensor | None) -> flow.Tensor | None:
    """The seed, None where nothing is dropped out; ValueError where it, or the dropout, is none."""
    if dropout == 0.0:
        return None
    if not 0.0 < dropout < 1.0:
        raise ValueError(f"dropout is {dropout}, not in [0, 1)")
    if seed is None or seed.dtype != flow.int64 or tuple(seed.shape) != (1,):
        found = "None" if seed is None else f"{tuple(seed.shape)} of {seed.dtype}"
        raise ValueError(
            f"dropout needs a seed of shape (1,) and int64, from draw_seed, not {found}"
        )
    return seed


def kept_weights(seed: int, shape: tuple[int, ...], dropout: float, first: int = 0) -> np.ndarray:
    """Truth values of (batch, heads, queries, keys): which weights are kept, each with the
    probability 1 - dropout, to 1 / 2^17; of queries from number `first` on."""
    batch, heads, queries, keys = shape
    key = np.arange(keys, dtype=np.uint64)
    counter = [
        (key // 128 * 16 + key % 32 // 2).reshape(1, 1, 1, keys),
        np.arange(first, first + queries, dtype=np.uint64).reshape(1, 1, queries, 1),
        np.arange(heads, dtype=np.uint64).reshape(1, heads, 1, 1),
        np.arange(batch, dtype=np.uint64).reshape(batch, 1, 1, 1),
    ]
    number = seed % 2**64
    words = philox(np.broadcast_arrays(*counter), (number & 0xFFFFFFFF, number >> 32))
    place = key % 64 // 32 * 2 + key % 2
    word = np.select([place == each for each in range(4)], words)
    half = np.where(key % 128 < 64, word & 0xFFFF, word >> 16)
    return np.asarray(half >= min(round(dropout * 2**16), 2**16 - 1))


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Four words of 32 bits, in uint64, for each counter of four such words."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (right >> _SHIFT) ^ b ^ np.uint64(low), right & _LOW
        c, d = (left >> _SHIFT) ^ d ^ np.uint64(high), left & _LOW
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def in_segments(values: np.ndarray, segments: np.ndarray, first: int = 0) -> np.ndarray:
    """(batch, heads, queries, keys) by keys' places in their sequence, to those by their places in
    the row; `segments` (batch, time) number the sequences of a row, and queries count from
    `first`."""
    queries, keys = values.shape[2:]
    own = segments[:, first : first + queries, None]
    begins = np.argmax(own == segments[:, None, :], axis=2)
    place = np.maximum(np.arange(keys) - begins[:, :, None], 0)
    place = np.broadcast_to(place[:, None], values.shape)
    return np.take_along_axis(values, place, axis=3)


def factors(
    scores: flow.Tensor,
    seed: flow.Tensor,
    dropout: float,
    segments: flow.Tensor | None = None,
    first: int = 0,
) -> flow.Tensor:
    """What weights of the shape, dtype and place of `scores`, of queries from number `first` on,
    are multiplied by: 1 / (1 - dropout), or 0 where they are dropped. UserError in an nn.Graph,
    which cannot read the seed."""
    if scores.is_lazy:
        raise UserError(
            "this dropout has no kernel for these tensors, and its reference, which "
            "draws in NumPy, cannot run in an nn.Graph: run it eagerly, or in float32 on a CPU "
            "with the plug-in"
        )
    local = seed.to_local() if seed.is_global else seed
    kept = kept_weights(int(local.item()), tuple(scores.shape), dropout, first)
    if segments is not None:
        kept = in_segments(kept, segments.numpy(), first)
    kept = kept / (1.0 - dropout)
    if not scores.is_global:
        return flow.tensor(kept, device=scores.device).to(scores.dtype)
    found = flow.tensor(kept, placement=scores.placement, sbp=_broadcast(scores))
    # As the weights lie, or the product of both would lie elsewhere.
    return found.to(scores.dtype).to_global(sbp=scores.sbp)


def _broadcast(like: flow.Tensor) -> list[flow.sbp.sbp]:
    return [flow.sbp.broadcast] * len(like.sbp)
