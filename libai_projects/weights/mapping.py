"""Names, shapes and layouts of GPT-2's weights in Hugging Face, LiBai 0.1.1 and upstream LiBai.

LiBai 0.1.1 is the layout that all others are turned into: linear weights (in, out), the fused
projection's output axis (heads, query/key/value, head size), the head tied to the token embedding.
Hugging Face has (in, out) as well, but (query/key/value, heads, head size); upstream LiBai is 0.1.1
with linear weights (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from libai_projects.weights import monarch

State = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

PREFIX = "GPT_model."
HUGGINGFACE_PREFIX = "transformer."
TOKEN_EMBEDDING = f"{PREFIX}embeddings.token_embeddings.weight"
QKV = monarch.QKV

_OUTSIDE = {
    "wte": "embeddings.token_embeddings",
    "wpe": "embeddings.position_embeddings",
    "ln_f": "transformer.layernorm_f",
}
_BLOCK = {
    "ln_1": "input_layernorm",
    "attn.c_attn": QKV,
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
_OUTSIDE_BACK = {libai: name for name, libai in _OUTSIDE.items()}
_BLOCK_BACK = {libai: name for name, libai in _BLOCK.items()}
_HUGGINGFACE_BLOCK = re.compile(r"h\.(\d+)\.(.+)\Z")
_LIBAI_BLOCK = re.compile(r"transformer\.layers\.(\d+)\.(.+)\Z")
_LINEAR = re.compile(
    r"layers\.\d+\.(self_attention\.(query_key_value|dense)|mlp\.dense_\w+)\.weight\Z"
)
# Causal masks and position numbers that some versions keep beside the weights, and the tied head.
_DERIVED_HUGGINGFACE = re.compile(r"(h\.\d+\.attn\.(masked_)?bias|lm_head\.weight)\Z")
_DERIVED_LIBAI = re.compile(
    r"(GPT_model\.)?(casual_mask\.mask|embeddings\.position_ids"
    r"|transformer\.layers\.\d+\.self_attention\.bias)\Z"
)


@dataclass
class Report:
    """How a set of weights differs from what a model has.

    Attributes:
        missing: names that the model has and the weights lack.
        unexpected: names that the model does not know.
        mis_shaped: (name, shape given, shape of the model).
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return bool(self.missing or self.unexpected or self.mis_shaped)

    def __str__(self) -> str:
        """One line per name, under a heading with the count for each of the three kinds."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "mis-shaped": [
                f"{name}: {given}, expected {wanted}" for name, given, wanted in self.mis_shaped
            ],
        }
        lines = []
        for kind, names in kinds.items():
            if names:
                lines += [f"{kind} ({len(names)}):", *(f"  {name}" for name in names)]
        return "\n".join(lines)

    def brief(self) -> str:
        """One line: how many there are of each kind, and the first of them."""
        kinds = [("missing", self.missing), ("unexpected", self.unexpected)]
        parts = [f"{len(names)} {kind} (such as {names[0]})" for kind, names in kinds if names]
        if self.mis_shaped:
            name, given, wanted = self.mis_shaped[0]
            parts.append(
                f"{len(self.mis_shaped)} of another shape (such as {name}: {given}, the model's "
                f"{wanted})"
            )
        return ", ".join(parts)

    def require_none(self, what: str, hint: str) -> None:
        """Raise unless there is no difference.

        Raises:
            MisfitError: lists every name.
        """
        if self:
            raise MisfitError(self, what, hint)


class MisfitError(UserError):
    """Weights are not those of the model; the text lists every name.

    Attributes:
        brief: the same in one line.
    """

    def __init__(self, report: Report, what: str, hint: str) -> None:
        super().__init__(f"{what} does not fit the model; {hint}\n{report}")
        self.brief = f"{what} does not fit the model: {report.brief()}"


def compare(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Report:
    """The differences between the shapes of two sets of names."""
    return Report(
        missing=[name for name in wanted if name not in given],
        unexpected=[name for name in given if name not in wanted],
        mis_shaped=[
            (name, shape, wanted[name])
            for name, shape in given.items()
            if name in wanted and tuple(shape) != tuple(wanted[name])
        ],
    )


def as_float32(array: np.ndarray) -> np.ndarray:
    """The array in float32; masks and other whole numbers as they are."""
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def shapes_of(state: Mapping[str, np.ndarray]) -> Shapes:
    """Name to shape."""
    return {name: tuple(array.shape) for name, array in state.items()}


def keep_fitting(state: State, wanted: Shapes) -> State:
    """The entries of a state dict whose name and shape are wanted, in the wanted order."""
    return {
        name: state[name]
        for name, shape in wanted.items()
        if name in state and state[name].shape == shape
    }


def expected_shapes(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of a model in LiBai 0.1.1's layout, in the order of its state dict.

    Args:
        config: num_layers, hidden_size, ffn_hidden_size, max_seq_length and vocab_size (rows), and
            what `monarch.layers` reads.
    """
    width = config["hidden_size"]
    shapes: Shapes = {
        "embeddings.token_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_seq_length"], width),
    }
    block = block_shapes(config)
    for layer in range(config["num_layers"]):
        for name, shape in block.items():
            shapes[f"transformer.layers.{layer}.{name}"] = shape
    shapes["transformer.layernorm_f.weight"] = shapes["transformer.layernorm_f.bias"] = (width,)
    return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}


def block_shapes(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of one block, in the order of its state dict.

    Args:
        config: hidden_size, ffn_hidden_size, and what `monarch.layers` reads.
    """
    width, inner = config["hidden_size"], config["ffn_hidden_size"]
    linear = {
        QKV: (width, 3 * width),
        monarch.DENSE: (width, width),
        monarch.INNER: (width, inner),
        monarch.OUTER: (inner, width),
    }
    factored = monarch.layers(config)
    shapes: Shapes = {}
    for part in _BLOCK.values():
        if part in factored:
            below = monarch.parameter_shapes(part, *linear[part], factored[part])
        else:
            shape = linear.get(part, (width,))
            below = {"weight": shape, "bias": shape[-1:]}
        shapes.update({f"{part}.{name}": shape for name, shape in below.items()})
    return shapes


def libai_name(name: str) -> str | None:
    """LiBai's name of a Hugging Face weight (without `transformer.`), None if unknown."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{PREFIX}{_OUTSIDE[module]}.{kind}"
    block = _HUGGINGFACE_BLOCK.match(module)
    if block is None or block[2] not in _BLOCK:
        return None
    return f"{PREFIX}transformer.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"


def huggingface_name(name: str) -> str:
    """The Hugging Face name, without `transformer.`, of a weight in LiBai's naming.

    Raises:
        UserError: GPT-2 has no such weight.
    """
    module, _, kind = name.removeprefix(PREFIX).rpartition(".")
    if module in _OUTSIDE_BACK:
        return f"{_OUTSIDE_BACK[module]}.{kind}"
    block = _LIBAI_BLOCK.match(module)
    if block is None or block[2] not in _BLOCK_BACK:
        raise UserError(f"{name!r} is not a weight of GPT-2, so it has no Hugging Face name")
    return f"h.{block[1]}.{_BLOCK_BACK[block[2]]}.{kind}"


def clean_huggingface(state: Mapping[str, np.ndarray]) -> State:
    """Take off the prefix `transformer.` and drop what follows from other weights.

    Raises:
        UserError: there is a head `lm_head.weight` that is not the token embedding: this model
            ties the two.
    """
    names = {name.removeprefix(HUGGINGFACE_PREFIX): array for name, array in state.items()}
    head, tokens = names.get("lm_head.weight"), names.get("wte.weight")
    if head is not None and tokens is not None and not np.array_equal(head, tokens):
        raise UserError(
            "its `lm_head.weight` differs from `wte.weight`; only a head that is tied to the token "
            "embedding can be used"
        )
    return {name: array for name, array in names.items() if not _DERIVED_HUGGINGFACE.match(name)}


def from_huggingface(state: Mapping[str, np.ndarray], heads: int) -> State:
    """Hugging Face's names and layout (prefix taken off) to LiBai 0.1.1's.

    Raises:
        UserError: a name that GPT-2 does not have.
    """
    result = {}
    for name, array in state.items():
        target = libai_name(name)
        if target is None:
            raise UserError(f"{name!r} is not a weight of GPT-2")
        result[target] = _swap_qkv(array, 3, heads) if f".{QKV}." in target else array
    return result


def to_huggingface(state: Mapping[str, np.ndarray], heads: int) -> State:
    """LiBai 0.1.1's names and layout to Hugging Face's, with the prefix `transformer.`.

    Raises:
        UserError: a name that GPT-2 does not have.
    """
    return {
        HUGGINGFACE_PREFIX + huggingface_name(name): (
            _swap_qkv(array, heads, 3) if f".{QKV}." in name else array
        )
        for name, array in state.items()
    }


def clean_libai(state: Mapping[str, np.ndarray]) -> State:
    """Give every name the prefix of the wrapping model and drop masks and position numbers."""
    return {
        PREFIX + name.removeprefix(PREFIX): array
        for name, array in state.items()
        if not _DERIVED_LIBAI.match(name)
    }


def linear_is_out_in(state: Mapping[str, np.ndarray], default: bool) -> bool:
    """Whether linear weights are (out, in), as upstream LiBai has them, and not (in, out).

    The fused projection and the two of the feed-forward are not square and have a bias over the out
    axis; they decide, and square weights follow them.

    Args:
        default: the answer where no weight tells.

    Raises:
        UserError: some weights are one way round and some the other.
    """
    found: dict[bool, str] = {}
    for name, array in state.items():
        bias = state.get(f"{name.removesuffix('weight')}bias")
        if not _LINEAR.search(name) or array.ndim != 2 or bias is None or bias.ndim != 1:
            continue
        rows, columns = array.shape
        if rows != columns and len(bias) in (rows, columns):
            found[len(bias) == rows] = name
    if len(found) == 2:
        raise UserError(
            f"{found[False]} is stored (in, out) and {found[True]} (out, in); weights of two "
            "versions of LiBai cannot be mixed"
        )
    return next(iter(found), default)


def transpose_linear(state: Mapping[str, np.ndarray]) -> State:
    """Exchange the axes of the linear weights: (out, in) to (in, out) and back."""
    return {
        name: np.ascontiguousarray(array.T) if _LINEAR.search(name) and array.ndim == 2 else array
        for name, array in state.items()
    }


def resize_vocabulary(array: np.ndarray, rows: int) -> np.ndarray:
    """Cut a (vocabulary, hidden) array to `rows`, or add rows of zeros.

    Nothing looks a padding row up, and its logit is masked by the model.
    """
    if rows <= len(array):
        return array[:rows]
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


def _swap_qkv(array: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """The last axis as (outer, inner, head size) to (inner, outer, head size)."""
    parts = array.reshape(*array.shape[:-1], outer, inner, -1)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)
