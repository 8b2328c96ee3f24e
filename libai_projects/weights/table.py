"""A model's weights as a table: names, shapes and layouts in Hugging Face and in LiBai 0.1.1, the
settings of config.json, and what a training begins with. What is here reads, writes and draws by
such a table; `gpt2.py`, `llama.py` and `bert.py` are three.

LiBai 0.1.1 is the layout that all others are turned into: linear weights (in, out), the output axis
of fused queries, keys and values (heads, query/key/value, head size). Upstream LiBai is 0.1.1 with
linear weights (out, in).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import numpy as np

from flow_train.metrics.work import training_flops, transformer_macs
from flow_train.rng import named_generator
from libai_projects.weights import monarch
from monarch_flow.projection import LayerSpec, densify_weights

State = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]
TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Part:
    """A module with a weight, by LiBai's name and Hugging Face's (`theirs`).

    `axes` are keys of the settings, in LiBai 0.1.1's layout; the last one is the bias's. A key as
    `bias` says whether there is one. With two axes and a bias, or a key for it, it is a linear
    layer. `fused` layers are side by side: 3 for queries, keys and values, which Hugging Face has
    (query/key/value, heads, head size), or where `apart` names them as modules of their own, which
    `theirs` stands for then. Where the key `unless` is true the module is not there; without
    `weight` it has a bias alone, whose size is the last axis. A `role` is one of `monarch.layers`,
    which says whether the layer is dense.
    """

    name: str
    theirs: str
    axes: tuple[str, ...] = ("hidden_size",)
    fused: int = 1
    bias: bool | str = True
    unless: str = ""
    apart: tuple[str, ...] = ()
    weight: bool = True
    role: str = ""

    def shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Shapes of what lies below the module."""
        if config.get(self.unless):
            return {}
        weight = tuple(config[key] for key in self.axes[:-1])
        weight += (self.fused * config[self.axes[-1]],)
        biased = config.get(self.bias) if isinstance(self.bias, str) else self.bias
        found = {"weight": weight, "bias": weight[-1:]} if biased else {"weight": weight}
        return found if self.weight else {"bias": found["bias"]}


@dataclass(frozen=True)
class Setting:
    """A number or truth value of the model's settings. `theirs` is the key of config.json and
    `default` transformers' value where it is left out; a function of the settings before it gives a
    size for null."""

    name: str
    theirs: str
    default: float | Callable[[Config], int]

    def read(self, content: Mapping[str, Any], config: Config, where: Path) -> float:
        """Its value in config.json; a UserError if that is not such a number."""
        value = content.get(self.theirs, None if callable(self.default) else self.default)
        if callable(self.default) and value is None:
            return self.default(config)
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise UserError(f"{where}: {self.theirs} is {value!r}; expected true or false")
            return value
        if isinstance(self.default, float):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise UserError(
                    f"{where}: {self.theirs} is {value!r}; expected a number of at least 0"
                )
            return float(value)
        if type(value) is not int or value < 1:
            raise UserError(f"{where}: {self.theirs} is {value!r}; expected a whole number above 0")
        return value

    def written(self, config: Config) -> float | None:
        value = config.get(self.name)
        if callable(self.default):
            return None if value in (None, self.default(config)) else int(value)
        return type(self.default)(self.default if value is None else value)


@dataclass(frozen=True)
class Table:
    """All that conversion has to know of a model; their_... are Hugging Face's.

    Attributes:
        block: a block's names, before its number.
        before, parts, after: what comes before the blocks, in each of them, and after.
        derived: names that follow from other weights, and are left out.
        tied: Hugging Face's names of the head, which has no prefix, and of the token embedding;
            they are one unless the setting tie_word_embeddings is false.
        ends_of_branches: what begins smaller, as it is added to the residual in each block.
        activations: config.json's name to LiBai's; the first one of LiBai's is written back.
        activation_key: config.json's key of it.
        their_linear_is_out_in: whether linear weights are (out, in) there.
        rows: rows that the vocabulary has in files which do not say how many of them are padding.
        derive: adds to settings what follows from others, or from their absence.
        read_more, write_more: settings that are not numbers, from config.json's content and to it.
        must_be: settings under which transformers may compute something else, with the value that
            this model takes and why.
        constants: what else goes into config.json.
        flops_of_all: whether people who train such a model count FLOPs of all weights, as
            embeddings and norms, and not only of those that are multiplied with.
    """

    title: str
    prefix: str
    their_prefix: str
    block: str
    their_block: str
    before: tuple[Part, ...]
    parts: tuple[Part, ...]
    after: tuple[Part, ...]
    derived: str
    their_derived: str
    tied: tuple[str, str]
    model_type: str
    architecture: str
    ends_of_branches: tuple[str, ...]
    settings: tuple[Setting, ...]
    activations: Mapping[str, str]
    must_be: Mapping[str, tuple[bool, str]]
    constants: Mapping[str, Any]
    activation_key: str = "activation_function"
    their_linear_is_out_in: bool = False
    rows: int | None = None
    derive: Callable[[Mapping[str, Any]], Config] = dict
    read_more: Callable[[Mapping[str, Any], Config, Path], Config] = lambda *_: {}
    write_more: Callable[[Config], Config] = lambda _: {}
    more_keys: tuple[str, ...] = ()
    flops_of_all: bool = False

    @property
    def tokens(self) -> str:
        """LiBai's name of the token embedding."""
        return f"{self.prefix}{self.before[0].name}.weight"

    @property
    def of_vocabulary(self) -> tuple[str, ...]:
        """LiBai's names of what may have a row for each token: the token embedding is the first."""
        parts = (part for part in self.before + self.after if part.axes[0] == "vocab_size")
        kinds = ((part.name, "weight" if part.weight else "bias") for part in parts)
        return tuple(f"{self.prefix}{name}.{kind}" for name, kind in kinds)

    def resized(self, state: Mapping[str, np.ndarray], rows: int) -> State:
        """`state` with so many rows of vocabulary; those that it lacks are 0, as no token ever
        looks them up."""
        return {
            name: resize_vocabulary(array, rows) if name in self.of_vocabulary else array
            for name, array in state.items()
        }

    @property
    def keys(self) -> frozenset[str]:
        others = "activation", "vocab_size_real", "apply_query_key_layer_scaling"
        return frozenset([*(s.name for s in self.settings), *self.more_keys, *others])

    @property
    def activation(self) -> str:
        """LiBai's activation of config.json's default."""
        return next(iter(self.activations.values()))

    @property
    def activation_names(self) -> dict[str, str]:
        """LiBai's activations to config.json's."""
        return {ours: theirs for theirs, ours in reversed(self.activations.items())}

    def block_shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Names and shapes of one block, by the sizes of a config and its Monarch layers."""
        config = self.derive(config)
        factored = monarch.layers(config)
        shapes: Shapes = {}
        for part in self.parts:
            below = part.shapes(config)
            if part.role in factored:
                below = monarch.structured_shapes(factored[part.role], below, part.fused)
            shapes.update({f"{part.name}.{kind}": shape for kind, shape in below.items()})
        return shapes

    def shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Names and shapes in LiBai 0.1.1's layout, in its state dict's order; vocab_size: rows."""
        config = self.derive(config)
        places = [(f"{part.name}.", part.shapes(config)) for part in self.before]
        block = self.block_shapes(config)
        places += [(f"{self.block}{layer}.", block) for layer in range(config["num_layers"])]
        places += [(f"{part.name}.", part.shapes(config)) for part in self.after]
        return {
            f"{self.prefix}{place}{name}": shape
            for place, shapes in places
            for name, shape in shapes.items()
        }

    def count(self, config: Mapping[str, Any]) -> int:
        """How many numbers all weights have together."""
        config = self.derive(config)
        ends = [part.shapes(config) for part in (*self.before, *self.after)]
        numbers = (sum(map(math.prod, each.values())) for each in ends)
        block = sum(map(math.prod, self.block_shapes(config).values()))
        return sum(numbers) + config["num_layers"] * block

    def product_weights(self, config: Mapping[str, Any]) -> int:
        """How many numbers each token is multiplied with: the layers', factors of structured ones
        included, and those that make logits."""
        config = self.derive(config)
        rows = config.get("vocab_size_real") or config["vocab_size"]
        # Norms and biases have one axis.
        matrices = [shape for shape in self.block_shapes(config).values() if len(shape) > 1]
        layers = config["num_layers"] * sum(map(math.prod, matrices))
        return layers + rows * config["hidden_size"]

    def flops_per_token(self, config: Mapping[str, Any]) -> int:
        """FLOPs of training one token of a sequence of max_seq_length."""
        config = self.derive(config)
        weights = self.count(config) if self.flops_of_all else self.product_weights(config)
        width = config.get("query_size", config["hidden_size"])
        sizes = config["num_layers"], width, config["max_seq_length"]
        return training_flops(transformer_macs(weights, *sizes))

    def their_shapes(self, config: Mapping[str, Any]) -> Shapes:
        """The same by Hugging Face's names, without prefix, and in its layout."""
        return {
            self.their_name(name): shape[::-1] if self._turned(name, len(shape)) else shape
            for name, shape in self.shapes(config).items()
        }

    def their_name(self, name: str) -> str:
        """The Hugging Face name, without its prefix, of a weight in LiBai's naming."""
        place, part = self._find(name.removeprefix(self.prefix), "name", self.block)
        if part is None:
            raise UserError(
                f"{name!r} is not a weight of {self.title}, so it has no Hugging Face name"
            )
        return f"{self.their_block if place else ''}{place}{part.theirs}.{name.rpartition('.')[2]}"

    def clean_huggingface(self, state: Mapping[str, np.ndarray], config: Config) -> State:
        """Take off the prefix, drop derived names, and join layers that are fused here; a UserError
        where the settings tie head and token embedding, and they differ."""
        # TensorFlow's names of a norm's weights, in the first files of BERT.
        names = {
            name.removeprefix(self.their_prefix)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): array
            for name, array in state.items()
        }
        derived = re.compile(rf"({self.their_derived})\Z")
        if config.get(TIED, True):
            head, tokens = map(names.get, self.tied)
            if head is not None and tokens is not None and not np.array_equal(head, tokens):
                raise UserError(
                    "its `{}` differs from `{}`; only a head that is tied to the token embedding "
                    "can be used".format(*self.tied)
                )
            names.pop(self.tied[0], None)
        return {n: array for n, array in self._joined(names).items() if not derived.match(n)}

    def _joined(self, state: State) -> State:
        """Layers that are `apart` as one, where all are there: outputs are the first axis."""
        for part in (part for part in self.parts if part.apart):
            first = part.apart[0]
            for name in [name for name in state if f".{first}." in name]:
                names = [name.replace(first, each) for each in part.apart]
                if all(each in state for each in names):
                    joined = np.concatenate([state.pop(each) for each in names])
                    state[name.replace(first, part.theirs)] = joined
        return state

    def clean_libai(self, state: Mapping[str, np.ndarray]) -> State:
        """Give every name the prefix of the wrapping model and drop what follows from others."""
        names = {name.removeprefix(self.prefix): array for name, array in state.items()}
        derived = re.compile(rf"({self.derived})\Z")
        return {
            self.prefix + name: array for name, array in names.items() if not derived.match(name)
        }

    def from_huggingface(self, state: Mapping[str, np.ndarray], heads: int) -> State:
        """Hugging Face's names and layout (prefix taken off) to LiBai 0.1.1's."""
        result = {}
        for name, array in state.items():
            place, part = self._find(name, "theirs", self.their_block)
            if part is None:
                raise UserError(f"{name!r} is not a weight of {self.title}")
            module = f"{self.prefix}{self.block if place else ''}{place}{part.name}"
            ours = f"{module}.{name.rpartition('.')[2]}"
            array = array.T if self._turned(ours, array.ndim) else array
            result[ours] = np.ascontiguousarray(_swapped(array, part.fused, heads))
        return result

    def to_huggingface(self, state: Mapping[str, np.ndarray], heads: int) -> State:
        """LiBai 0.1.1's names and layout to Hugging Face's, with the prefix."""
        result = {}
        for name, array in state.items():
            _, part = self._find(name.removeprefix(self.prefix), "name", self.block)
            array = _swapped(array, heads, part.fused if part else 1)
            theirs = self.their_name(name)
            if theirs != self.tied[0]:
                theirs = self.their_prefix + theirs
            array = array.T if self._turned(name, array.ndim) else array
            if part is None or not part.apart:
                result[theirs] = array
                continue
            for one, piece in zip(part.apart, np.split(array, part.fused), strict=True):
                result[theirs.replace(part.theirs, one)] = np.ascontiguousarray(piece)
        return result

    def transposed(self, state: Mapping[str, np.ndarray]) -> State:
        """Exchange the axes of the linear weights: (out, in) to (in, out) and back."""
        return {
            name: np.ascontiguousarray(array.T) if self._is_linear(name, array.ndim) else array
            for name, array in state.items()
        }

    def linear_is_out_in(self, state: Mapping[str, np.ndarray], default: bool) -> bool:
        """Whether linear weights are (out, in), as upstream LiBai has them, and not (in, out).
        Those that are not square and have a bias decide, else `default`; weights of both kinds are
        a UserError."""
        found: dict[bool, str] = {}
        for name, array in state.items():
            bias = state.get(f"{name.removesuffix('weight')}bias")
            if not self._is_linear(name, array.ndim) or bias is None or bias.ndim != 1:
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

    def densified(self, state: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> State:
        """The same function with dense layers only, in LiBai 0.1.1's layout; `config` has the
        model's sizes."""
        config, layers = self.derive(config), {}
        for name, array in state.items():
            module, _, kind = name.rpartition(".")
            if array.ndim == 3 and kind in ("blkdiag1", "weight"):
                part = next(part for part in self.parts if f".{part.name}." in name)
                of = "monarch" if kind == "blkdiag1" else "blockdiag"
                layers[module] = LayerSpec(of, *(config[axis] for axis in part.axes), len(array))
        dense, _ = densify_weights(state, layers)
        return monarch.in_libai_layout(dense, layers, config["num_attention_heads"])

    def read_config(self, content: Mapping[str, Any], where: Path) -> Config:
        """LiBai's model settings from config.json's `content`; a UserError where it describes
        another architecture, or what this model cannot compute."""
        kind, (first, *_) = content.get("model_type"), content.get("architectures") or ["none"]
        named = str(first).startswith(self.architecture.partition("LMHead")[0])
        if kind != self.model_type and not (kind is None and named):
            raise UserError(
                f"{where} describes a model of type {kind!r} ({first}); only {self.title} "
                f"(model_type {self.model_type!r}) can be converted"
            )
        default = next(iter(self.activations))
        activation = content.get(self.activation_key, default)
        if activation not in self.activations:
            raise UserError(
                f"{where}: {self.activation_key} is {activation!r}; this model has "
                f"{', '.join(map(repr, self.activations))}"
            )
        for key, (needed, why) in self.must_be.items():
            if bool(content.get(key, needed)) != needed:
                raise UserError(f"{where}: {key} is {content[key]!r}; {why} in this model")
        config: Config = {}
        for setting in self.settings:
            config[setting.name] = setting.read(content, config, where)
        check_heads(config, where)
        config.update(self.read_more(content, config, where))
        config["activation"] = self.activations[activation]
        config["vocab_size_real"] = config["vocab_size"]
        return config

    def written_config(self, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """config.json for LiBai settings, whose vocab_size is the rows written; a UserError where
        one is missing, or transformers' model has nothing like it."""
        config = dict(config)
        sizes = (s.name for s in self.settings if type(s.default) is int)
        missing = [name for name in sizes if config.get(name) is None]
        if missing:
            raise UserError(f"the model's settings lack {', '.join(missing)}")
        names, activation = self.activation_names, config.get("activation") or self.activation
        if activation not in names:
            raise UserError(
                f"activation is {activation!r}; expected {' or '.join(map(repr, names))}"
            )
        if config.get("apply_residual_post_layernorm"):
            raise UserError(
                f"apply_residual_post_layernorm is true, which {self.title} does not have"
            )
        check_heads(config)
        return {
            self.activation_key: names[activation],
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "torch_dtype": dtype,
            **self.constants,
            **{setting.theirs: setting.written(config) for setting in self.settings},
            **self.write_more(config),
        }

    def known_settings(self, settings: Mapping[str, Any]) -> Config:
        """The entries that describe the model; interpolations ("${...}") and nulls say nothing."""
        return {
            key: value
            for key, value in settings.items()
            if (key == "activation" and value in self.activation_names)
            or (key in self.keys and isinstance(value, int | float))
            or (key in self.more_keys and isinstance(value, Mapping))
        }

    def sizes_of(self, state: Mapping[str, np.ndarray], known: Mapping[str, Any] = {}) -> Config:
        """Sizes and Monarch layers that the shapes in LiBai 0.1.1's layout tell, not the number of
        heads; what they do not tell of an inner width, `known` settings do. A UserError without
        token embedding or block."""
        block = f"{self.prefix}{self.block}"
        layers = [
            int(found[1])
            for found in (re.match(rf"{re.escape(block)}(\d+)\.", name) for name in state)
            if found
        ]
        tokens = state.get(self.tokens)
        if tokens is None or tokens.ndim != 2 or not layers:
            some = ", ".join(list(state)[:3])
            raise UserError(
                f"these are not the weights of LiBai's {self.title}: it holds {some} ..."
            )
        config: Config = {"num_layers": 1 + max(layers)}
        names = {setting.name for setting in self.settings}
        structured: dict[str, dict[str, Any] | None] = {}
        for below, parts in ((self.prefix, self.before + self.after), (f"{block}0.", self.parts)):
            for part in parts:
                weight = state.get(f"{below}{part.name}.weight")
                if part.unless:
                    config[part.unless] = weight is None
                if isinstance(part.bias, str):
                    config[part.bias] = f"{below}{part.name}.bias" in state
                # Fused layers and Monarch ones have other axes than these.
                if weight is not None and part.fused == 1 and weight.ndim == len(part.axes):
                    sizes = zip(part.axes, weight.shape, strict=True)
                    config.update((axis, size) for axis, size in sizes if axis in names)
                if part.role:
                    own = f"{below}{part.name}."
                    inside = own if part.fused == 1 else f"{own}{monarch.QKV_PARTS[0]}."
                    structured[part.role] = found = monarch.layer_of(state, inside)
                    if found and part.role == monarch.INNER:
                        width = monarch.outputs_of(state, own, known.get(part.axes[-1]))
                        config[part.axes[-1]] = width
        config.setdefault("ffn_hidden_size", 4 * config["hidden_size"])
        return {**config, **monarch.settings_of(structured)}

    def output_axis(self, theirs: str) -> int | None:
        """Which axis the outputs are of a linear weight of a block, or of the head where it has a
        weight, by Hugging Face's name without prefix; None for all other weights."""
        place, part = self._find(theirs, "theirs", self.their_block)
        if part is None or len(part.axes) != 2 or not theirs.endswith(".weight"):
            return None
        if place:
            return 0 if self.their_linear_is_out_in else 1
        return 0 if theirs == self.tied[0] else None

    def _find(self, name: str, side: str, block: str) -> tuple[str, Part | None]:
        """A weight's block, as "3." or "" for none, and its part; names of a `side` of parts."""
        module, place, parts = name.rpartition(".")[0], "", self.before + self.after
        if found := re.match(rf"{re.escape(block)}(\d+\.)", module):
            module, place, parts = module[found.end() :], found[1], self.parts
        return place, next((part for part in parts if getattr(part, side) == module), None)

    def _is_linear(self, name: str, axes: int) -> bool:
        _, part = self._find(name.removeprefix(self.prefix), "name", self.block)
        linear = part is not None and bool(part.bias) and len(part.axes) == 2
        return linear and name.endswith(".weight") and axes == 2

    def _turned(self, name: str, axes: int) -> bool:
        """Whether Hugging Face has the axes of a weight, by LiBai's name, the other way round."""
        return self.their_linear_is_out_in and self._is_linear(name, axes)


@dataclass
class Report:
    """How weights differ from a model's: names missing, unexpected, and shapes (name, is,
    wanted)."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mis_shaped)

    def _kinds(self) -> dict[str, list[str]]:
        shapes = [f"{name}: {given}, expected {wanted}" for name, given, wanted in self.mis_shaped]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
        return {kind: names for kind, names in kinds.items() if names}

    def __str__(self) -> str:
        """One line per name, under a heading with the count for each of the three kinds."""
        return "\n".join(
            "\n  ".join([f"{kind} ({len(names)}):", *names])
            for kind, names in self._kinds().items()
        )

    def brief(self) -> str:
        """One line: how many there are of each kind, and the first of them."""
        return ", ".join(
            f"{len(names)} {kind} (such as {names[0]})" for kind, names in self._kinds().items()
        )


class MisfitError(UserError):
    """Weights are not those of the model; the text lists every name, `brief` is one line."""

    def __init__(self, report: Report, what: str, hint: str) -> None:
        super().__init__(f"{what} does not fit the model; {hint}\n{report}")
        self.brief = f"{what} does not fit the model: {report.brief()}"


def compare(state: Mapping[str, np.ndarray], wanted: Shapes) -> tuple[Report, State]:
    """How weights differ from the shapes wanted, and those that fit, in the wanted order."""
    report = Report(
        missing=[name for name in wanted if name not in state],
        unexpected=[name for name in state if name not in wanted],
        mis_shaped=[
            (name, tuple(array.shape), wanted[name])
            for name, array in state.items()
            if name in wanted and array.shape != tuple(wanted[name])
        ],
    )
    unfit = {name for name, _, _ in report.mis_shaped}
    return report, {n: state[n] for n in wanted if n in state and n not in unfit}


def as_float32(array: np.ndarray) -> np.ndarray:
    """The array in float32; masks and other whole numbers as they are."""
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def resize_vocabulary(array: np.ndarray, rows: int) -> np.ndarray:
    """Cut a (vocabulary, hidden) array to `rows`, or add zeros, which no token ever looks up."""
    if rows <= len(array):
        return array[:rows]
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


def check_heads(config: Mapping[str, Any], where: Path | None = None) -> None:
    """A UserError where the number of heads does not divide the width."""
    if config["hidden_size"] % config["num_attention_heads"]:
        place = f"{where}: " if where else ""
        raise UserError(
            f"{place}{config['num_attention_heads']} heads do not divide a width of "
            f"{config['hidden_size']}"
        )


def _swapped(array: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """The last axis as (outer, inner, head size) to (inner, outer, head size)."""
    if 1 in (outer, inner):
        return array
    parts = array.reshape(*array.shape[:-1], outer, inner, -1)
    return np.ascontiguousarray(parts.swapaxes(-3, -2)).reshape(array.shape)


def initial_weights(
    table: Table, config: Mapping[str, Any], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Each weight of `cfg.model.cfg`, by LiBai 0.1.1's name; float32; `seed` is at least 0, and one
    seed is one model in every layout.

    Normal with `initializer_range`, those that end a block divided by sqrt(2 x layers) unless
    `use_scaled_init_for_output_weights` is false, block-diagonal ones times sqrt(blocks), which
    keeps the output's variance; Monarch layers as monarch_flow draws them; biases 0, norms 1, the
    row of pad_token_id 0. Each
    depends on the seed and its name alone: more rows of the vocabulary leave those before as they
    are.
    """
    shapes = table.shapes(config)
    pad = config.get("pad_token_id")
    for name, shape in shapes.items():
        array = _draw(name, shapes, config, named_generator(seed, name), table.ends_of_branches)
        if pad is not None and name == table.tokens:
            array[pad] = 0
        yield name, array.reshape(shape)


def _draw(
    name: str,
    shapes: Shapes,
    config: Mapping[str, Any],
    generator: np.random.Generator,
    ends_of_branches: tuple[str, ...],
) -> np.ndarray:
    shape = shapes[name]
    module, _, kind = name.rpartition(".")
    factored = f"{module}.blkdiag1" in shapes
    if factored:
        # Kaiming's uniform rule, as monarch_flow.layers has it.
        bound = np.float32(1 / math.sqrt(shape[0] if kind == "bias" else shape[-1]))
        return bound * (2 * generator.random(shape, np.float32) - 1)
    if kind == "bias":
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    std = config.get("initializer_range", 0.02)
    if module.endswith(ends_of_branches) and config.get("use_scaled_init_for_output_weights", True):
        std /= math.sqrt(2 * config["num_layers"])
    if len(shape) == 3:
        std *= math.sqrt(shape[0])
    return generator.standard_normal(shape, np.float32) * np.float32(std)
