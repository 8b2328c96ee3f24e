"""A model's weights as a table: names, shapes and layouts in Hugging Face and in LiBai 0.1.1, the
settings of config.json, and what a training begins with. What is here reads, writes and draws by
such a table; `gpt2.py` is one.

LiBai 0.1.1 is the layout that all others are turned into: linear weights (in, out), the output axis
of fused queries, keys and values (heads, query/key/value, head size), the head tied to the token
embedding. Upstream LiBai is 0.1.1 with linear weights (out, in).
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

from flow_train.rng import named_generator
from libai_projects.weights import monarch

State = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A module with a weight, by LiBai's name and Hugging Face's (`theirs`).

    `axes` are keys of the settings, in LiBai 0.1.1's layout; the last one is the bias's. With two
    axes and a bias it is a linear layer. `fused` layers are side by side: 3 for queries, keys and
    values, which Hugging Face has (query/key/value, heads, head size).
    """

    name: str
    theirs: str
    axes: tuple[str, ...] = ("hidden_size",)
    fused: int = 1
    bias: bool = True

    def shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Shapes of what lies below the module."""
        weight = tuple(config[key] for key in self.axes[:-1])
        weight += (self.fused * config[self.axes[-1]],)
        return {"weight": weight, "bias": weight[-1:]} if self.bias else {"weight": weight}


@dataclass(frozen=True)
class Setting:
    """A number of the model's settings. `theirs` is the key of config.json, `default` transformers'
    where it is left out; a function of the settings before it gives a size for null."""

    name: str
    theirs: str
    default: float | Callable[[Config], int]

    def read(self, content: Mapping[str, Any], config: Config, where: Path) -> float:
        """Its value in config.json; a UserError if that is not such a number."""
        value = content.get(self.theirs, None if callable(self.default) else self.default)
        if callable(self.default) and value is None:
            return self.default(config)
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
        tied: Hugging Face's names of the head and of the token embedding, if they are one.
        activations: config.json's name to LiBai's; the first one of LiBai's is written back.
        must_be: settings under which transformers may compute something else, with the value that
            this model takes and why.
        constants: what else goes into config.json.
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
    settings: tuple[Setting, ...]
    activations: Mapping[str, str]
    must_be: Mapping[str, tuple[bool, str]]
    constants: Mapping[str, Any]

    @property
    def tokens(self) -> str:
        """LiBai's name of the token embedding."""
        return f"{self.prefix}{self.before[0].name}.weight"

    @property
    def keys(self) -> frozenset[str]:
        others = "activation", "vocab_size_real", "apply_query_key_layer_scaling"
        return frozenset([*(setting.name for setting in self.settings), *others])

    @property
    def activation_names(self) -> dict[str, str]:
        """LiBai's activations to config.json's."""
        return {ours: theirs for theirs, ours in reversed(self.activations.items())}

    def block_shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Names and shapes of one block, by the sizes of a config and its Monarch layers."""
        factored = monarch.layers(config)
        shapes: Shapes = {}
        for part in self.parts:
            below = part.shapes(config)
            if part.name in factored:
                layer = factored[part.name]
                below = monarch.parameter_shapes(part.name, *below["weight"], layer)
            shapes.update({f"{part.name}.{kind}": shape for kind, shape in below.items()})
        return shapes

    def shapes(self, config: Mapping[str, Any]) -> Shapes:
        """Names and shapes in LiBai 0.1.1's layout, in its state dict's order; vocab_size: rows."""
        places = [(f"{part.name}.", part.shapes(config)) for part in self.before]
        block = self.block_shapes(config)
        places += [(f"{self.block}{layer}.", block) for layer in range(config["num_layers"])]
        places += [(f"{part.name}.", part.shapes(config)) for part in self.after]
        return {
            f"{self.prefix}{place}{name}": shape
            for place, shapes in places
            for name, shape in shapes.items()
        }

    def their_name(self, name: str) -> str:
        """The Hugging Face name, without its prefix, of a weight in LiBai's naming."""
        place, part = self._find(name.removeprefix(self.prefix), "name", self.block)
        if part is None:
            raise UserError(
                f"{name!r} is not a weight of {self.title}, so it has no Hugging Face name"
            )
        return f"{self.their_block if place else ''}{place}{part.theirs}.{name.rpartition('.')[2]}"

    def clean_huggingface(self, state: Mapping[str, np.ndarray]) -> State:
        """Take off the prefix and drop derived names; a UserError where the head is not the token
        embedding, as this model ties the two."""
        names = {name.removeprefix(self.their_prefix): array for name, array in state.items()}
        head, tokens = map(names.get, self.tied)
        if head is not None and tokens is not None and not np.array_equal(head, tokens):
            raise UserError(
                "its `{}` differs from `{}`; only a head that is tied to the token embedding can "
                "be used".format(*self.tied)
            )
        derived = re.compile(rf"({self.their_derived}|{re.escape(self.tied[0])})\Z")
        return {name: array for name, array in names.items() if not derived.match(name)}

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
            kind = name.rpartition(".")[2]
            result[f"{module}.{kind}"] = _swapped(array, part.fused, heads)
        return result

    def to_huggingface(self, state: Mapping[str, np.ndarray], heads: int) -> State:
        """LiBai 0.1.1's names and layout to Hugging Face's, with the prefix."""
        result = {}
        for name, array in state.items():
            _, part = self._find(name.removeprefix(self.prefix), "name", self.block)
            fused = part.fused if part else 1
            result[self.their_prefix + self.their_name(name)] = _swapped(array, heads, fused)
        return result

    def transposed(self, state: Mapping[str, np.ndarray]) -> State:
        """Exchange the axes of the linear weights: (out, in) to (in, out) and back."""
        return {
            name: np.ascontiguousarray(array.T) if self._is_linear(name, array) else array
            for name, array in state.items()
        }

    def linear_is_out_in(self, state: Mapping[str, np.ndarray], default: bool) -> bool:
        """Whether linear weights are (out, in), as upstream LiBai has them, and not (in, out).
        Those that are not square and have a bias decide, else `default`; weights of both kinds are
        a UserError."""
        found: dict[bool, str] = {}
        for name, array in state.items():
            bias = state.get(f"{name.removesuffix('weight')}bias")
            if not self._is_linear(name, array) or bias is None or bias.ndim != 1:
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
        activation = content.get("activation_function", default)
        if activation not in self.activations:
            raise UserError(
                f"{where}: activation_function is {activation!r}; this model has "
                f"{', '.join(map(repr, self.activations))}"
            )
        for key, (needed, why) in self.must_be.items():
            if bool(content.get(key, needed)) != needed:
                raise UserError(f"{where}: {key} is {content[key]!r}; {why} in this model")
        config: Config = {}
        for setting in self.settings:
            config[setting.name] = setting.read(content, config, where)
        check_heads(config, where)
        config["activation"] = self.activations[activation]
        config["vocab_size_real"] = config["vocab_size"]
        return config

    def written_config(self, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """config.json for LiBai settings, whose vocab_size is the rows written; a UserError where
        one is missing, or transformers' model has nothing like it."""
        config = dict(config)
        sizes = (s.name for s in self.settings if isinstance(s.default, int))
        missing = [name for name in sizes if config.get(name) is None]
        if missing:
            raise UserError(f"the model's settings lack {', '.join(missing)}")
        names, activation = self.activation_names, config.get("activation") or "gelu_tanh"
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
            "activation_function": names[activation],
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "torch_dtype": dtype,
            **self.constants,
            **{setting.theirs: setting.written(config) for setting in self.settings},
        }

    def known_settings(self, settings: Mapping[str, Any]) -> Config:
        """The entries that describe the model; interpolations ("${...}") and nulls say nothing."""
        return {
            key: value
            for key, value in settings.items()
            if (key == "activation" and value in self.activation_names)
            or (key in self.keys and isinstance(value, int | float))
        }

    def sizes_of(self, state: Mapping[str, np.ndarray]) -> Config:
        """Sizes and Monarch layers that the shapes in LiBai 0.1.1's layout tell, not the number of
        heads. A UserError without token embedding or block."""
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
        for part in self.before:
            weight = state.get(f"{self.prefix}{part.name}.weight")
            if weight is not None:
                config.update(zip(part.axes, weight.shape, strict=False))
        inner = [state[name] for name in state if name.endswith(f"{monarch.INNER}.bias")]
        config["ffn_hidden_size"] = len(inner[0]) if inner else 4 * config["hidden_size"]
        return {**config, **monarch.settings_of(state, f"{block}0.")}

    def _find(self, name: str, side: str, block: str) -> tuple[str, Part | None]:
        """A weight's block, as "3." or "" for none, and its part; names of a `side` of parts."""
        module, place, parts = name.rpartition(".")[0], "", self.before + self.after
        if found := re.match(rf"{re.escape(block)}(\d+\.)", module):
            module, place, parts = module[found.end() :], found[1], self.parts
        return place, next((part for part in parts if getattr(part, side) == module), None)

    def _is_linear(self, name: str, array: np.ndarray) -> bool:
        _, part = self._find(name.removeprefix(self.prefix), "name", self.block)
        linear = part is not None and part.bias and len(part.axes) == 2
        return linear and name.endswith(".weight") and array.ndim == 2


@dataclass
class Report:
    """How weights differ from a model's: names missing, unexpected, and shapes (name, is,
    wanted)."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mis_shaped)

    def __str__(self) -> str:
        """One line per name, under a heading with the count for each of the three kinds."""
        shapes = [f"{name}: {given}, expected {wanted}" for name, given, wanted in self.mis_shaped]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
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


_END_OF_A_BLOCK = (".self_attention.dense.weight", ".mlp.dense_4h_to_h.weight")


def initial_weights(
    table: Table, config: Mapping[str, Any], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Each weight of `cfg.model.cfg`, by LiBai 0.1.1's name; float32; `seed` is at least 0, and one
    seed is one model in every layout.

    Normal with `initializer_range`, those that end a block divided by sqrt(2 x layers) unless
    `use_scaled_init_for_output_weights` is false, block-diagonal ones times sqrt(blocks), which
    keeps the output's variance; Monarch layers as monarch_flow draws them; biases 0, norms 1. Each
    depends on the seed and its name alone: more rows of the vocabulary leave those before as they
    are.
    """
    shapes = table.shapes(config)
    for name, shape in shapes.items():
        yield name, _draw(name, shapes, config, named_generator(seed, name)).reshape(shape)


def _draw(
    name: str, shapes: Shapes, config: Mapping[str, Any], generator: np.random.Generator
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
    if "layernorm" in module:
        return np.ones(shape, np.float32)
    std = config.get("initializer_range", 0.02)
    if name.endswith(_END_OF_A_BLOCK) and config.get("use_scaled_init_for_output_weights", True):
        std /= math.sqrt(2 * config["num_layers"])
    if len(shape) == 3:
        std *= math.sqrt(shape[0])
    return generator.standard_normal(shape, np.float32) * np.float32(std)
