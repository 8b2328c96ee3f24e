"""Attention as one operation, softmax of scores with dropout, and the Performer's attention.

`scaled_dot_product_attention` and `packed_attention` drop out weights by a seed, a tensor that the
caller draws with `draw_seed`; the mask is a function of it and is never stored. The mask of
`causal_softmax_mask_scale` is the caller's: OneFlow's own functions draw it themselves, under
nn.Graph from a seed that is the same for every layer, while `oneflow.rand` follows `manual_seed`
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from oneflow_accel.backends.cuda import CudaBackend, attention_reasons
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.kernels.operators import (
    Operator,
    after,
    differentiable,
    empty_reasons,
    needs_gradient,
    numbers,
    widened,
    with_gradient,
)
from oneflow_accel.kernels.registry import (
    cpu_implementation,
    implementation,
    on_cards,
    register_operation,
)
from oneflow_accel.kernels.weight_dropout import checked_seed, draw_seed, factors

import oneflow as flow

__all__ = [
    "can_drop_weights",
    "causal_softmax",
    "causal_softmax_mask_scale",
    "draw_seed",
    "hidden_columns",
    "packed_attention",
    "performer_attention",
    "scaled_dot_product_attention",
]

# OneFlow's operator; its Python function for it draws the mask.
_tril = Operator(
    "fused_tril_scale_softmax_mask_scale",
    inputs=("x", "mask"),
    outputs=("y", "softmax_y"),
    attributes={
        "diagonal": "int64",
        "tril_fill_value": "float",
        "tril_scale_value": "float",
        "mask_scale_value": "float",
    },
)
# exp(HIDDEN - maximum) is 0 in every dtype, and unlike -infinity it leaves a row that sees
# nothing finite.
HIDDEN = -10000.0


def _causal_reference(
    scores: flow.Tensor, keep: flow.Tensor, scale: float, keep_scale: float
) -> flow.Tensor:
    return causal_softmax(scores, scale) * (keep.to(scores.dtype) * keep_scale)


causal_softmax_mask_scale = register_operation(
    "causal_softmax_mask_scale",
    reference=_causal_reference,
    doc="softmax of scale * scores over the columns up to the row's, times keep_scale where keep "
    "is true, else 0: scores and keep (..., time, time)",
    lacks={MluBackend.name: "oneflow_mlu has no fused_* operator: a sum, softmax and a product"},
)


def causal_softmax(scores: flow.Tensor, scale: float) -> flow.Tensor:
    """softmax(scale scores) over the columns up to the row's own, made of plain operators.

    Row i of (..., rows, columns), local or global, sees columns up to i + columns - rows; the
    result is 0 where it does not see a column.
    """
    # A sum, as masking operators do not exist on every device.
    return flow.softmax(scores * scale + hidden_columns(scores) * HIDDEN, dim=-1)


def hidden_columns(scores: flow.Tensor) -> flow.Tensor:
    """1 where a row of (..., rows, columns) does not see a column and 0 elsewhere, (rows, columns),
    of the same dtype and, for global tensors, broadcast: row i sees columns up to
    i + columns - rows."""
    rows, columns = scores.shape[-2:]
    last = numbers(rows, scores).reshape(rows, 1) + (columns - rows)
    return (numbers(columns, scores).reshape(1, columns) > last).to(scores.dtype)


# OneFlow has a CUDA kernel too; the plug-in is what calls it with a given mask.
@implementation(
    "causal_softmax_mask_scale",
    backend=CudaBackend.name,
    dtypes=(flow.float32, flow.float64, flow.float16),
    missing_reasons=_tril.missing_reasons,
    never_run=True,
)
@cpu_implementation("causal_softmax_mask_scale", _tril)
def fused_causal_softmax_mask_scale(
    scores: flow.Tensor, keep: flow.Tensor, scale: float, keep_scale: float
) -> flow.Tensor:
    """One pass over the scores, and no mask of what a row sees."""
    return _tril(
        scores,
        keep,
        diagonal=scores.shape[-1] - scores.shape[-2],
        tril_fill_value=HIDDEN,
        tril_scale_value=scale,
        mask_scale_value=keep_scale,
    )[0]


_TYPES = {"causal": "bool", "scale": "double", "dropout": "double"}
# The last inputs, each of which may be left out.
_OPTIONAL = ("seed", "segments")


def _operator(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Operator:
    return Operator(name, (*inputs, *_OPTIONAL), outputs, _TYPES, optional=_OPTIONAL)


_attention = _operator("oneflow_accel_attention", ("query", "key", "value"), ("out", "lse"))
_attention_grad = _operator(
    "oneflow_accel_attention_grad",
    ("out_grad", "query", "key", "value", "out", "lse"),
    ("query_grad", "key_grad", "value_grad"),
)
_packed = _operator("oneflow_accel_packed_attention", ("qkv",), ("out", "lse"))
_packed_grad = _operator(
    "oneflow_accel_packed_attention_grad", ("out_grad", "qkv", "out", "lse"), ("qkv_grad",)
)


def scaled_dot_product_attention(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: flow.Tensor | None = None,
    segments: flow.Tensor | None = None,
) -> flow.Tensor:
    """softmax(scale query key^T) value, for each batch entry and head: (batch, heads, queries, dim)
    from a query of this shape and a key and a value (batch, kv_heads, keys, dim) of the same dtype,
    local or global (split along batch or heads); ValueError if the shapes do not fit.

    kv_heads divides heads: query head j uses key and value head j // (heads // kv_heads)
    (grouped-query attention, Ainslie et al. 2023).

    If `causal`, query i sees key j where j <= i + keys - queries (keys >= queries): the last query
    sees all keys, as generation with a key/value cache needs it. `scale` None means 1 / sqrt(dim).

    `dropout`, at least 0 and below 1, is the probability with which each weight, after softmax, is
    0; the others are multiplied by 1 / (1 - dropout). Which ones are kept depends on `seed`, an
    int64 tensor of one element that `draw_seed` draws, and on the weight's place in the whole
    tensor: not on threads, nor on how global tensors are split.

    `segments`, int64 (batch, time), are numbers of the sequences that are packed in a row, which do
    not see each other; they must not fall along the time, and keys are as many as queries. Dropout
    takes a key's place in its sequence then.
    """
    _check_shapes(query, key, value, causal)
    _check_segments(segments, query.shape[0], query.shape[2], key.shape[2])
    return _attention_operation(
        *(query, key, value, checked_seed(dropout, seed), segments),
        causal=causal,
        scale=_scale(scale, query.shape[-1]),
        dropout=float(dropout),
    )


def packed_attention(
    qkv: flow.Tensor,
    num_heads: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: flow.Tensor | None = None,
    segments: flow.Tensor | None = None,
) -> flow.Tensor:
    """Self-attention of the three parts of one projection, read where they lie: the layout in which
    a linear layer of 3 x heads x dim outputs gives them, as in ViT and GPT-2.

    `qkv` is (batch, time, 3 x heads x dim) or (batch, time, 3, heads, dim), local or global; along
    axis 2 query, key and value. A global tensor that is split along heads must have five axes.
    Gives (batch, time, heads x dim); ValueError if the shape does not fit. `causal`, `scale`,
    `dropout`, `seed` and `segments` as above.
    """
    shape = tuple(qkv.shape)
    fits = shape[2:4] == (3, num_heads) if len(shape) == 5 else len(shape) == 3
    if not fits or num_heads < 1 or math.prod(shape[2:]) % (3 * num_heads) or shape[1] == 0:
        raise ValueError(
            f"qkv of {shape} is neither (batch, time, 3 x heads x dim) nor (batch, time, 3, heads, "
            f"dim) with {num_heads} heads and at least one position"
        )
    dim = math.prod(shape[2:]) // (3 * num_heads)
    if len(shape) == 3:
        qkv = qkv.reshape(*shape[:2], 3, num_heads, dim)
    _check_segments(segments, shape[0], shape[1], shape[1])
    out = _packed_operation(
        *(qkv, checked_seed(dropout, seed), segments),
        causal=causal,
        scale=_scale(scale, dim),
        dropout=float(dropout),
    )
    return out.reshape(*shape[:2], num_heads * dim)


def can_drop_weights(qkv: flow.Tensor) -> bool:
    """Whether `packed_attention` has a kernel that drops out weights for tensors like `qkv`; plain
    operators take what NumPy draws, which is slow and not for an nn.Graph."""
    chosen = _packed_operation.choose(qkv, None, None, causal=False, scale=1.0, dropout=0.5)
    return chosen not in (_packed_operation.reference, chunked_packed_attention)


def _check_shapes(query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, causal: bool) -> None:
    q, k, v = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    four = len(q) == len(k) == 4 and k == v
    fits = four and (q[0], q[3]) == (k[0], k[3]) and k[2] > 0
    if not fits or (q[1] != k[1] and (k[1] == 0 or q[1] % k[1])):
        raise ValueError(
            f"query {q}, key {k} and value {v} are not (batch, heads, queries, dim) and twice "
            "(batch, heads, keys, dim) with at least one key, and heads that divide the query's"
        )
    if causal and k[2] < q[2]:
        raise ValueError(f"causal attention of {q[2]} queries needs as many keys, not {k[2]}")


def _check_segments(segments: flow.Tensor | None, batch: int, queries: int, keys: int) -> None:
    if segments is None:
        return
    if tuple(segments.shape) != (batch, queries) or queries != keys:
        raise ValueError(
            f"segments {tuple(segments.shape)} are not (batch, time) = {(batch, queries)} with as "
            f"many keys as queries, of which there are {keys} and {queries}"
        )
    if segments.dtype != flow.int64:
        raise ValueError(f"segments are of {segments.dtype}, not of int64")


def _scale(scale: float | None, dim: int) -> float:
    return 1.0 / math.sqrt(max(dim, 1)) if scale is None else float(scale)


def _composition(
    query: flow.Tensor,
    key: flow.Tensor,
    value: flow.Tensor,
    seed: flow.Tensor | None = None,
    segments: flow.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    first: int = 0,
) -> flow.Tensor:
    """Of the queries from number `first` on, and of the keys that they see."""
    weights = _weights(query, key, causal, scale, segments, first)
    if seed is not None:
        weights = weights * factors(weights, seed, dropout, segments, first)
    rows = _as_rows(weights.to(value.dtype), value)
    return flow._C.matmul(rows, value).reshape(*query.shape)


def _weights(
    query: flow.Tensor,
    key: flow.Tensor,
    causal: bool,
    scale: float,
    segments: flow.Tensor | None,
    first: int,
) -> flow.Tensor:
    """softmax(scale query key^T), (batch, heads, queries, keys), in float32 of 16 bits."""
    batch, heads, queries, _ = query.shape
    keys, rows = key.shape[2], _as_rows(query, key)

    def product(first: int, end: int) -> flow.Tensor:
        scores = flow._C.matmul(rows, key[:, :, first:end], transpose_b=True, alpha=scale)
        return widened(scores.reshape(batch, heads, queries, end - first))

    # All queries see the keys before those of their own number.
    own = keys - queries if causal and queries > 1 else keys
    scores = product(own, keys) if own < keys else product(0, keys)
    # Sums, as masking operators do not exist on every device.
    least = flow.finfo(scores.dtype).min
    if own < keys:
        scores = scores + hidden_columns(scores) * least
        scores = flow.cat([product(0, own), scores], dim=-1) if own else scores
    if segments is not None:
        mine = segments[:, first : first + queries].reshape(batch, 1, queries, 1)
        others = mine != segments[:, :keys].reshape(batch, 1, 1, keys)
        # Half of the least, as it is added to what the causal rule hides.
        scores = scores + others.to(scores.dtype) * (least / 2)
    return flow.softmax(scores, dim=-1)


def _as_rows(x: flow.Tensor, key: flow.Tensor) -> flow.Tensor:
    """(batch, heads, queries, n) as (batch, kv_heads, rows, n): heads that share keys are more rows
    of one product."""
    batch, heads, queries, size = x.shape
    return x.reshape(batch, key.shape[1], heads // key.shape[1] * queries, size)


def _unpacked(attention: Callable[..., flow.Tensor], name: str) -> Callable[..., flow.Tensor]:
    """Of the parts of one projection; a function of this name."""

    def unpacked(qkv: flow.Tensor, *optional: flow.Tensor | None, **attributes: Any) -> flow.Tensor:
        # Not by slices, whose gradient has no kernel on some devices.
        parts = (qkv.narrow(2, part, 1).squeeze(2).permute(0, 2, 1, 3) for part in range(3))
        return attention(*parts, *optional, **attributes).permute(0, 2, 1, 3)

    unpacked.__name__ = name
    return unpacked


_NO_ATTENTION = {
    MluBackend.name: "oneflow_mlu has no attention operator: products and softmax by blocks"
}
_attention_operation = register_operation(
    "scaled_dot_product_attention",
    reference=_composition,
    doc="dropout(softmax(scale query key^T)) value; heads may share keys and values.",
    lacks=_NO_ATTENTION,
)
_packed_operation = register_operation(
    "packed_attention",
    reference=_unpacked(_composition, "packed_composition"),
    doc="dropout(softmax(scale query key^T)) value of the parts of one projection.",
    lacks=_NO_ATTENTION,
)


# Both keep no (queries, keys) matrix, neither for the output nor for the gradient; bfloat16 is
# computed in float32.
cpu_implementation("scaled_dot_product_attention", _attention)(
    with_gradient("blocked_attention", _attention, _attention_grad, autocast=flow.bfloat16)
)
cpu_implementation("packed_attention", _attention)(
    with_gradient("blocked_packed_attention", _packed, _packed_grad, autocast=flow.bfloat16)
)


# OneFlow's own operator on CUDA devices (CUTLASS): for inference, with the usual scale. Only in
# float16, as it computes float32 in TF32.
def _inference_reasons(
    *tensors: Any, causal: bool, scale: float, dropout: float = 0.0
) -> list[str]:
    """Of query, key and value, or of the parts of one projection; then seed and segments."""
    *given, _, segments = tensors
    time = 2 if len(given) == 3 else 1
    query, key = given[0], given[time - 1]
    dim, queries, keys = query.shape[-1], query.shape[time], key.shape[time]
    reasons = attention_reasons()
    if dropout:
        reasons.append("drops out no weights")
    if segments is not None:
        reasons.append("knows of no packed sequences")
    if needs_gradient(*given):
        reasons.append("has no gradient")
    if not math.isclose(scale, _scale(None, dim)):
        reasons.append(f"scales by 1 / sqrt({dim}), not by {scale}")
    if causal and queries != keys:
        reasons.append(f"hides columns by their number, so {queries} queries need as many keys")
    if len(given) == 3 and query.shape[1] != key.shape[1]:
        reasons.append("needs as many heads of keys and values as of queries")
    return reasons


@implementation(
    "scaled_dot_product_attention",
    backend=CudaBackend.name,
    dtypes=(flow.float16,),
    not_supported_reasons=_inference_reasons,
    never_run=True,
)
def cutlass(
    query: flow.Tensor, key: flow.Tensor, value: flow.Tensor, *_: None, causal: bool, **_others: Any
) -> flow.Tensor:
    batch, heads, queries, dim = query.shape
    rows = [part.permute(0, 2, 1, 3).flatten(2) for part in (query, key, value)]
    out = flow._C.fused_multi_head_attention_inference(*rows, num_heads=heads, causal=causal)
    return out.reshape(batch, queries, heads, dim).permute(0, 2, 1, 3)


@implementation(
    "packed_attention",
    backend=CudaBackend.name,
    dtypes=(flow.float16,),
    not_supported_reasons=_inference_reasons,
    never_run=True,
)
def cutlass_packed(qkv: flow.Tensor, *_: None, causal: bool, **_others: Any) -> flow.Tensor:
    batch, time, _, heads, dim = qkv.shape
    width = heads * dim
    rows = qkv.flatten(2)
    slices = {
        f"{part}_hidden_slice_{end}": (place + shift) * width
        for place, part in enumerate(("query", "key", "value"))
        for shift, end in enumerate(("start", "end"))
    }
    out = flow._C.fused_multi_head_attention_inference(
        rows, rows, rows, num_heads=heads, causal=causal, **slices
    )
    return out.reshape(batch, time, heads, dim)


# Where a device has no kernel: so many queries at a time, computed again in the backward pass (Rabe
# and Staats 2021, "Self-attention does not need O(n^2) memory"; gradients: Dao et al. 2022,
# "FlashAttention", appendix B.2). A block's rows are whole, so that softmax is that of OneFlow, and
# keeps nothing beside the output.
BLOCK = 256


def _blocks(query: flow.Tensor, key: flow.Tensor, causal: bool) -> list[tuple[int, int, int]]:
    """First query, last and number of keys, counted from the first, of each block."""
    queries, keys = query.shape[2], key.shape[2]
    ends = [min(first + BLOCK, queries) for first in range(0, queries, BLOCK)]
    seen = [keys - queries + end if causal else keys for end in ends]
    return list(zip(range(0, queries, BLOCK), ends, seen, strict=True))


def _gradient_by_blocks(
    kept: Any, out_grad: flow.Tensor, *, causal: bool, scale: float, dropout: float
) -> tuple[flow.Tensor | None, ...]:
    query, key, value, seed, segments, out = kept
    multiply = flow._C.matmul

    def of_block(block: tuple[int, int, int], previous: flow.Tensor) -> tuple[flow.Tensor, ...]:
        first, end, seen = block
        q, dy, y = (after(x[:, :, first:end], previous) for x in (query, out_grad, out))
        k, v = key[:, :, :seen], value[:, :, :seen]
        weights = dropped = _weights(q, k, causal, scale, segments, first)
        if seed is not None:
            factor = factors(weights, seed, dropout, segments, first)
            dropped = weights * factor
        dy_rows = _as_rows(dy, v)
        value_grad = multiply(_as_rows(dropped.to(v.dtype), v), dy_rows, transpose_a=True)
        grad = multiply(after(dy_rows, value_grad), v, transpose_b=True)
        grad = widened(grad).reshape(*weights.shape)
        if seed is not None:
            grad = grad * factor
        along = (widened(dy) * widened(y)).sum(dim=-1, keepdim=True)
        grad = _as_rows((weights * (grad - along)).to(q.dtype), k)
        key_grad = multiply(grad, _as_rows(q, k), transpose_a=True, alpha=scale)
        query_grad = multiply(grad, after(k, key_grad), alpha=scale).reshape(*q.shape)
        return query_grad, widened(key_grad), widened(value_grad)

    # The last block sees all keys, so that its gradients have room for those of the others.
    *others, last = _blocks(query, key, causal)
    query_grad, *totals = of_block(last, out_grad)
    query_grads = [query_grad]
    for block in reversed(others):
        query_grad, *found = of_block(block, query_grad)
        query_grads.append(query_grad)
        totals = [_added(*pair) for pair in zip(totals, found, strict=True)]
    totals = [total.to(key.dtype) for total in totals]
    return (flow.cat(query_grads[::-1], dim=2), *totals, None, None)


def _added(total: flow.Tensor, found: flow.Tensor) -> flow.Tensor:
    """The sum along axis 2, where `found` may be shorter."""
    seen = found.shape[2]
    if seen == total.shape[2]:
        return total + found
    return flow.cat([total[:, :, :seen] + found, total[:, :, seen:]], dim=2)


@implementation("scaled_dot_product_attention", not_supported_reasons=empty_reasons)
@differentiable(_attention.name, _gradient_by_blocks, autocast=flow.bfloat16)
def chunked_attention(*tensors: Any, **attributes: Any) -> Any:
    """Keeps no (queries, keys) matrix, and has one of BLOCK queries at a time."""
    query, key, value, *optional = tensors
    if query.shape[2] <= BLOCK:
        out = _composition(*tensors, **attributes)
        return out, (*tensors, out)
    outs: list[flow.Tensor] = []
    for first, end, seen in _blocks(query, key, attributes["causal"]):
        q = query[:, :, first:end]
        q = after(q, outs[-1]) if outs else q
        parts = q, key[:, :, :seen], value[:, :, :seen]
        outs.append(_composition(*parts, *optional, first=first, **attributes))
    out = flow.cat(outs, dim=2)
    return out, (*tensors, out)


chunked_packed_attention = implementation("packed_attention", not_supported_reasons=empty_reasons)(
    _unpacked(chunked_attention, "chunked_packed_attention")
)


_performer = Operator(
    "oneflow_accel_performer",
    inputs=("kqv", "w"),
    # The last: what the queries read of keys and values, which the gradient needs too.
    outputs=("out", "value", "summary"),
    attributes={"epsilon": "double"},
)
_performer_grad = Operator(
    "oneflow_accel_performer_grad",
    ("out_grad", "value_grad", "kqv", "w", "out", "summary"),
    ("kqv_grad",),
    {"epsilon": "double"},
)


def performer_attention(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float = 1e-8
) -> tuple[flow.Tensor, flow.Tensor]:
    """Attention by positive random features (Choromanski et al. 2021, section 2.3), of one head.

    With phi(x) = exp(w x - |x|^2 / 2) / sqrt(features), token t gets phi(q_t) (sum_s phi(k_s)
    v_s^T) / (phi(q_t) sum_s phi(k_s) + epsilon).

    kqv is (batch, time, 3 x dim), key, query and value in this order; w (features, dim) is
    constant: kernels have no gradient for it, and the reference runs where it requires one. Global
    tensors may be split along the batch, with w broadcast. ValueError if the shapes do not fit.

    Gives the attention, and the value alone, both (batch, time, dim): models add the second to what
    they make of the first, and to take it from kqv would cost its gradient another copy.
    """
    projection, features = tuple(kqv.shape), tuple(w.shape)
    if (
        len(projection) != 3
        or len(features) != 2
        or 0 in features
        or projection[2] != 3 * features[1]
    ):
        raise ValueError(
            f"kqv {projection} and w {features} are not (batch, time, 3 x dim) and (features, dim)"
        )
    return _performer_operation(kqv, w, epsilon=float(epsilon))


def _performer_reference(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float
) -> tuple[flow.Tensor, flow.Tensor]:
    dtype, dim = kqv.dtype, w.shape[1]
    if dtype in (flow.float16, flow.bfloat16):
        # Neither the exponentials nor 1e-8 can be told from 0 or infinity in 16 bits.
        kqv, w = kqv.to(flow.float32), w.to(flow.float32)
    key, query, value = (kqv[:, :, part * dim : (part + 1) * dim] for part in range(3))
    if 0 in kqv.shape:
        # OneFlow's own kernel for products of float64 ends the process without rows.
        return (value * 0).to(dtype), value.to(dtype)
    keys, queries = _random_features(key, w), _random_features(query, w)
    summary = flow.matmul(keys.transpose(1, 2), value)
    total = flow.matmul(queries, keys.sum(dim=1).unsqueeze(-1))
    out = flow.matmul(queries, summary) / (total + epsilon)
    return out.to(dtype), value.to(dtype)


def _random_features(x: flow.Tensor, w: flow.Tensor) -> flow.Tensor:
    """phi(x), (batch, time, features), positive."""
    half_squares = (x * x).sum(dim=-1, keepdim=True) / 2
    projected = flow.matmul(x, w.transpose(0, 1))
    return flow.exp(projected - half_squares) / math.sqrt(w.shape[0])


_performer_operation = register_operation(
    "performer_attention",
    reference=_performer_reference,
    doc="phi(q) (phi(k)^T v) / (phi(q) sum phi(k) + epsilon) with positive random features phi, of "
    "the parts of one projection, and v",
    lacks=on_cards("no such operator there: products, sums and an exponential one after another"),
)


def _performer_not_supported(kqv: flow.Tensor, w: flow.Tensor, **attributes: Any) -> list[str]:
    return ["has no gradient for w"] if needs_gradient(w) else []


_performed = with_gradient("performed", _performer, _performer_grad, autocast=None)


@cpu_implementation(
    "performer_attention", _performer, not_supported_reasons=_performer_not_supported
)
def in_tiles(
    kqv: flow.Tensor, w: flow.Tensor, *, epsilon: float
) -> tuple[flow.Tensor, flow.Tensor]:
    """Reads the projection where it lies, and keeps no features of tokens. bfloat16 is computed in
    float32."""
    return _performed(kqv, w.to(flow.float32), epsilon=epsilon)
