"""What a step of generation is made of: "packed_linear", a linear layer with weights of 32, 16 or 8
bits in panels, and "paged_attention", which keeps keys and values in pages.

Generating token by token is bound by reading weights and keys: so these hold them in as few bytes
as asked for, in the order in which a processor reads them, and take what surrounds a product (norm,
bias, activation, residual) along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oneflow_accel.inference.huge_pages import use_huge_pages
from oneflow_accel.kernels.attention import scaled_dot_product_attention
from oneflow_accel.kernels.operators import Operator, gradient_reasons
from oneflow_accel.kernels.registry import cpu_implementation, on_cards, register_operation
from oneflow_accel.kernels.transformer import rms_norm, rope, swiglu

import numpy as np
import oneflow as flow

PAGE = 64
"""Tokens of a page of the key-value cache."""
WeightsDtype = Literal["float32", "bfloat16", "int8"]
CacheDtype = Literal["float32", "bfloat16"]

# Outputs of a panel, weights of 8 bits that share an activation's scale, and the weights in a
# 32-bit word and multiples of inputs by dtype.
_PANEL, _GROUP = 64, 64
_VALUES: dict[str, int] = dict(zip(get_args(WeightsDtype), (1, 2, 4), strict=True))
_MULTIPLES = {1: 1, 2: 32, 4: _GROUP}
# Bytes are weights + this, as processors multiply unsigned with signed ones.
_ZERO = 128

_linear = Operator(
    "oneflow_accel_packed_linear",
    ("x", "panels", "scales", "bias", "residual", "norm_weight", "norm_bias"),
    ("y",),
    {
        "values": "int32",
        "outputs": "int32",
        "activation": "string",
        "norm": "string",
        "epsilon": "double",
    },
    optional=("scales", "bias", "residual", "norm_weight", "norm_bias"),
)


@dataclass(frozen=True)
class Norm:
    """A layer norm ("layer") or the division by the root mean square ("rms") of rows (rows, n),
    with weight and bias (n,)."""

    kind: str
    weight: flow.Tensor
    bias: flow.Tensor | None
    epsilon: float

    def __call__(self, x: flow.Tensor) -> flow.Tensor:
        if self.kind == "rms":
            return rms_norm(x, self.weight, epsilon=self.epsilon)
        return flow.nn.functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self.epsilon
        )


def activate(x: flow.Tensor, activation: str) -> flow.Tensor:
    """ReLU or a GELU of x, by the names that `packed_linear` has; x itself for ""."""
    if activation in ("gelu", "gelu_tanh"):
        return flow._C.gelu_with_approximate(x, "tanh" if activation == "gelu_tanh" else "none")
    return flow.relu(x) if activation == "relu" else x


def rounded(weight: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers (..., out, in) as `dtype` has them; int8 with a scale for each output."""
    if dtype == "float32":
        return weight
    if dtype == "bfloat16":
        return (_bfloat16_bits(weight).astype(np.uint32) << 16).view(np.float32)
    whole, scales = quantised(weight)
    return whole * scales[..., None]


def _bfloat16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # To the nearest, ties to even; a NaN stays one.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers from -127 to 127, float32, of a float32 weight (..., out, in), and the float32
    scale of each output, (..., out): its largest magnitude / 127, or 1 where that is 0. Halves are
    rounded to even. Of numbers times scales it gives the same ones again, to the last bit."""
    scales = np.abs(weight).max(-1) / np.float32(127)
    scales[scales == 0] = 1
    return np.rint(weight / scales[..., None]), scales


def _rounded_rows(x: flow.Tensor, values: int) -> flow.Tensor:
    """Activations as they meet weights of which `values` are in a word."""
    if values == 1:
        return x
    # On the host: not every device has a kernel that rounds.
    rows = x.detach().numpy()
    if values == 2:
        return flow.tensor(rounded(rows, "bfloat16"), device=x.device)
    groups = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _GROUP))).reshape(len(rows), -1, _GROUP)
    whole = rounded(groups, "int8").reshape(len(rows), -1)[:, : rows.shape[1]]
    return flow.tensor(np.ascontiguousarray(whole), device=x.device)


def _multiply(
    x: flow.Tensor,
    weight: flow.Tensor,
    bias: flow.Tensor | None,
    residual: flow.Tensor | None,
    norm: Norm | None,
    *,
    values: int,
    outputs: int,
    activation: str,
) -> flow.Tensor:
    """The operation with the weight (64 P, in) float32, its rows in the order of the panels."""
    if norm is not None:
        x = norm(x)
    y = flow._C.matmul(_rounded_rows(x, values), weight, transpose_b=True)
    if bias is not None:
        y = y + bias
    if activation == "swiglu":
        halves = y.reshape(y.shape[0], -1, 2, _PANEL // 2)
        gate, up = (
            halves.narrow(2, i, 1).reshape(y.shape[0], -1).narrow(1, 0, outputs // 2)
            for i in range(2)
        )
        y = swiglu(gate, up)
    else:
        y = activate(y.narrow(1, 0, outputs), activation)
    return y if residual is None else residual + y


def _linear_reference(
    x: flow.Tensor,
    panels: flow.Tensor,
    scales: flow.Tensor | None,
    bias: flow.Tensor | None,
    residual: flow.Tensor | None,
    norm_weight: flow.Tensor | None,
    norm_bias: flow.Tensor | None,
    *,
    values: int,
    outputs: int,
    activation: str,
    norm: str,
    epsilon: float,
) -> flow.Tensor:
    weight = flow.tensor(_unpacked(panels.numpy(), values)[:, : x.shape[1]], device=x.device)
    if scales is not None:
        weight = weight * scales.reshape(-1, 1)
    before = Norm(norm, norm_weight, norm_bias, epsilon) if norm else None
    if bias is not None:
        bias = flow.nn.functional.pad(bias, (0, weight.shape[0] - bias.shape[0]))
    settings: dict[str, Any] = {"values": values, "outputs": outputs, "activation": activation}
    return _multiply(x, weight, bias, residual, before, **settings)


packed_linear = register_operation(
    "packed_linear",
    reference=_linear_reference,
    doc="residual + act(W norm(x) + bias): x (rows, in) float32; W in panels (P, words, 64) int32 "
    "of 64 outputs, words of `values` weights along the inputs; scales (64 P,) of int8; bias as "
    "the panels' outputs; residual (rows, out); norm_weight and norm_bias (in,); activation '', "
    "'relu', 'gelu', 'gelu_tanh', or 'swiglu' of panels of 32 gates and what they let through; "
    "norm '', 'layer' or 'rms'",
    lacks=on_cards("no such operator there: a norm, a product with the rounded weight, and sums"),
)


@cpu_implementation(
    "packed_linear", _linear, dtypes=(flow.float32,), not_supported_reasons=gradient_reasons
)
def packed(*tensors: flow.Tensor | None, **attributes: object) -> flow.Tensor:
    """Each weight is read once; a row's result does not depend on the rows beside it."""
    return _linear(*tensors, **attributes)[0]


def _packed(cells: np.ndarray, values: int) -> np.ndarray:
    """Panels of weights (64 P, in) of 32 / `values` bits, `in` a multiple of `values`."""
    rows = cells.reshape(-1, _PANEL, cells.shape[1] // values, values)
    words = np.ascontiguousarray(rows.transpose(0, 2, 1, 3))
    return words.view(np.int32)[..., 0]


def _unpacked(panels: np.ndarray, values: int) -> np.ndarray:
    """Weights (64 P, padded in) float32, of int8 without their scales."""
    kind = {1: np.float32, 2: np.uint16, 4: np.uint8}[values]
    cells = np.ascontiguousarray(panels)[..., None].view(kind).transpose(0, 2, 1, 3)
    cells = cells.reshape(panels.shape[0] * _PANEL, -1)
    if values == 2:
        return (cells.astype(np.uint32) << 16).view(np.float32)
    return cells.astype(np.float32) - (_ZERO if values == 4 else 0)


class PackedLinear:
    """residual + act(W norm(x) + bias), of rows (rows, in) float32, with W rounded to `dtype`.

    Args:
        weight: (out, in) float32; with `gate` the rows of the gate and then those that it lets
            through, (2 n, in).
        bias: (out,) float32, or None.
        dtype: "float32", "bfloat16", or "int8" with a scale for each output. Activations are
            rounded likewise, to int8 in groups of 64.
        activation: of the sum, see `packed_linear`.
        gate: the result is silu(gate) times the other half, (rows, n).
    """

    def __init__(
        self,
        weight: np.ndarray,
        bias: np.ndarray | None,
        dtype: str,
        device: flow.device,
        *,
        activation: str = "",
        gate: bool = False,
    ) -> None:
        activation = "swiglu" if gate else activation
        values, (outputs, inputs) = _VALUES[dtype], weight.shape
        self._settings: dict[str, Any] = {
            "values": values,
            "outputs": outputs,
            "activation": activation,
        }
        self._weight: flow.Tensor | None = None
        self._scales: flow.Tensor | None = None
        self._bias: flow.Tensor | None = None
        self._bound: dict[tuple[str, float], Callable[..., Any]] = {}
        if bias is not None:
            self._bias = flow.tensor(_rows_of_panels(bias, activation), device=device)
        weight = _rows_of_panels(weight, activation)
        # For good: choosing takes longer than starting the operator.
        self._run = packed_linear.choose(flow.zeros(1, inputs, device=device))
        if self._run is packed_linear.reference:
            # It would unpack the panels each time.
            self._weight = flow.tensor(rounded(weight, dtype), device=device)
            use_huge_pages(self._weight)
            return
        if dtype == "int8":
            weight, scales = quantised(weight)
            self._scales = flow.tensor(scales, device=device)
            weight = (weight + _ZERO).astype(np.uint8)
        elif dtype == "bfloat16":
            weight = _bfloat16_bits(weight)
        padding = (0, -inputs % _MULTIPLES[values])
        fill = _ZERO if values == 4 else 0
        cells = np.pad(weight, ((0, 0), padding), constant_values=fill)
        self._panels = flow.tensor(_packed(cells, values), device=device)
        use_huge_pages(self._panels)

    def __call__(
        self, x: flow.Tensor, residual: flow.Tensor | None = None, norm: Norm | None = None
    ) -> flow.Tensor:
        """(rows, in) float32 to (rows, out), with what is added to it, and the norm before it."""
        if self._weight is not None:
            return _multiply(x, self._weight, self._bias, residual, norm, **self._settings)
        before = (None, None) if norm is None else (norm.weight, norm.bias)
        tensors = (x, self._panels, self._scales, self._bias, residual, *before)
        kind, epsilon = ("", 0.0) if norm is None else (norm.kind, norm.epsilon)
        if self._run is not packed:
            return self._run(*tensors, **self._settings, norm=kind, epsilon=epsilon)
        if (key := (kind, epsilon)) not in self._bound:
            self._bound[key] = _linear.bound(**self._settings, norm=kind, epsilon=epsilon)
        return self._bound[key](*tensors)[0]


def _rows_of_panels(rows: np.ndarray, activation: str) -> np.ndarray:
    """(out, ...) as (64 P, ...) in the order of the panels, with zeros in the places left over."""
    halves = 2 if activation == "swiglu" else 1
    size = _PANEL // halves
    parts = rows.reshape(halves, -1, *rows.shape[1:])
    padding = [(0, 0), (0, -parts.shape[1] % size), *[(0, 0)] * (rows.ndim - 1)]
    parts = np.pad(parts, padding).reshape(halves, -1, size, *rows.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(-1, *rows.shape[1:])


_attention = Operator(
    "oneflow_accel_paged_attention",
    (
        *("qkv", "keys", "values", "tables", "sequences", "positions"),
        *("copies", "cosines", "sines"),
    ),
    ("context",),
    {"heads": "int32", "scale": "double", "interleaved": "bool"},
    optional=("copies", "cosines", "sines"),
)


def new_pages(
    pages: int, heads: int, size: int, dtype: str, device: flow.device
) -> tuple[flow.Tensor, flow.Tensor]:
    """Keys (pages, heads, size, 64) and values (pages, heads, 64, size rounded up to 16)."""
    kind = {"dtype": getattr(flow, dtype), "device": device}
    width = -(-size // 16) * 16
    # Zeros, as what no token has written yet is multiplied by weights of 0.
    keys = flow.zeros(pages, heads, size, PAGE, **kind)
    return keys, flow.zeros(pages, heads, PAGE, width, **kind)


def _attention_reference(
    qkv: flow.Tensor,
    keys: flow.Tensor,
    values: flow.Tensor,
    tables: flow.Tensor,
    sequences: flow.Tensor,
    positions: flow.Tensor,
    copies: flow.Tensor | None,
    cosines: flow.Tensor | None,
    sines: flow.Tensor | None,
    *,
    heads: int,
    scale: float,
    interleaved: bool,
) -> flow.Tensor:
    """One sequence after another, whose tokens follow each other."""
    for origin, copy in () if copies is None else copies.numpy().tolist():
        keys[copy], values[copy] = keys[origin], values[origin]
    _, shared, size, _ = keys.shape
    parts = flow.split(qkv.reshape(len(qkv), -1, size), [heads, shared, shared], dim=1)
    query, key, value = parts
    if cosines is not None:
        query, key = (
            rope(each.unsqueeze(0), cosines, sines, axis=1, interleaved=interleaved).squeeze(0)
            for each in (query, key)
        )
    key, value = key.to(keys.dtype), value.to(values.dtype)
    contexts = []
    rows, places, pages = sequences.numpy(), positions.numpy(), tables.numpy()
    begins = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist()] if len(rows) else []
    for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
        table, first, length = pages[rows[begin]], int(places[begin]), int(places[end - 1]) + 1
        for page in range(first // PAGE, -(-length // PAGE)):
            # The slots of this page, and the tokens that go there.
            low, high = max(first, page * PAGE), min(length, (page + 1) * PAGE)
            tokens = slice(begin + low - first, begin + high - first)
            slots = slice(low - page * PAGE, high - page * PAGE)
            keys[int(table[page]), :, :, slots] = key[tokens].permute(1, 2, 0)
            values[int(table[page]), :, slots, :size] = value[tokens].permute(1, 0, 2)
        held = table[: -(-length // PAGE)].astype(np.int64)
        index = flow.tensor(held, device=keys.device)
        seen_keys = flow._C.gather(keys, index, axis=0).permute(1, 0, 3, 2)
        seen_values = flow._C.gather(values, index, axis=0).permute(1, 0, 2, 3)
        seen = [
            each.reshape(1, shared, PAGE * len(held), -1)[:, :, :length, :size].to(flow.float32)
            for each in (seen_keys, seen_values)
        ]
        asking = query[begin:end].permute(1, 0, 2).unsqueeze(0)
        context = scaled_dot_product_attention(asking, *seen, causal=True, scale=scale)
        contexts.append(context.squeeze(0).permute(1, 0, 2).reshape(end - begin, heads * size))
    return flow.cat(contexts) if contexts else flow.zeros(0, heads * size, device=qkv.device)


paged_attention = register_operation(
    "paged_attention",
    reference=_attention_reference,
    doc="attention of tokens of several sequences to those before them and to themselves: qkv "
    "(tokens, (heads + 2 kv) size) float32, queries, then keys, then values; keys (pages, kv, "
    "size, 64) and values (pages, kv, 64, size rounded up to 16), of float32 or bfloat16, which "
    "these tokens' are written to; tables (sequences, pages) int32, sequences and positions "
    "(tokens,) int32; copies (n, 2) int32 of pages, from and to, made before; cosines and sines "
    "(tokens, size / 2) of rotary embedding; to (tokens, heads size)",
    lacks=on_cards("no such operator there: each sequence's pages are gathered for attention"),
)


@cpu_implementation("paged_attention", _attention, not_supported_reasons=gradient_reasons)
def paged(*tensors: flow.Tensor | None, **attributes: object) -> flow.Tensor:
    """Each key and value is read once, where it lies."""
    return _attention(*tensors, **attributes)[0]


class PagedAttention:
    """`paged_attention` with its settings, of tensors that are alike at each call."""

    def __init__(self, *, heads: int, scale: float, interleaved: bool = False) -> None:
        self._settings = {"heads": heads, "scale": scale, "interleaved": interleaved}
        self._run: Callable[..., flow.Tensor] | None = None
        self._bound: Callable[..., Any] | None = None

    def __call__(self, *tensors: flow.Tensor | None) -> flow.Tensor:
        """The operation's tensors, in its order, to its result."""
        if self._run is None:
            self._run = paged_attention.choose(*tensors, **self._settings)
        if self._run is not paged:
            return self._run(*tensors, **self._settings)
        self._bound = self._bound or _attention.bound(**self._settings)
        return self._bound(*tensors)[0]
