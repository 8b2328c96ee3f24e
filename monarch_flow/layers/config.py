"""Which linear layer stands in a place: LinearConfig, the layers it can name, and where they go.

    LinearConfig.of("monarch").build(768, 3072)
    LinearConfig.of({"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 8})

A layer joins them with `register_linear`. Nothing is imported by name: the last part of a target is
looked up among known classes, and the part before it must be a package that had or has them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from oneflow_accel.errors import UserError, nearest

from oneflow import nn

T = TypeVar("T")

TARGET = "_target_"
# The packages that a target may name: ours, and those of the papers' own code, so that their
# configs can be used as they are.
_PACKAGES = ("monarch_flow.", "src.models.", "src.ops.")
# Hydra's own keys; they say nothing about the class.
_HYDRA_KEYS = ("_recursive_", "_convert_")
# A regular expression that is found in no text.
_NEVER = r"(?!)"
_COLLECTING = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def choices(word: str, known: Collection[str]) -> str:
    """'did you mean ...?' with the nearest known word, whatever the case, and all of them."""
    guess = "".join(f"did you mean '{name}'? " for name in nearest(word, known, cutoff=0.0))
    return f"{guess}There are: {', '.join(sorted(known)) or 'none'}"


def split_target(
    config: Mapping[str, Any], known: Mapping[str, T], what: str
) -> tuple[T, dict[str, Any]]:
    """The class that a config names, and its options.

    The target is a key of `known` or a dotted path that ends with one; `what` says what these are
    in messages. Raises UserError where there is no `_target_`, or it names none of them.
    """
    options = {str(key): value for key, value in config.items() if key not in _HYDRA_KEYS}
    target = options.pop(TARGET, None)
    if not isinstance(target, str):
        raise UserError(
            f"the config of a {what} needs a key '{TARGET}' that names a class; it has: "
            f"{', '.join(map(str, config)) or 'no keys'}"
        )
    package, _, name = target.rpartition(".")
    if package and not f"{package}.".startswith(_PACKAGES):
        raise UserError(
            f"'{target}' is not a {what} of this package: a target starts with 'monarch_flow.'; "
            f"{choices(name, known)}"
        )
    if name not in known:
        raise UserError(f"there is no {what} '{target}'; {choices(name, known)}")
    return known[name], options


def fill_options(
    options: Mapping[str, Any], function: Any, given: Collection[str], what: str
) -> dict[str, Any]:
    """`options` with the defaults of a class or function for those that are not there.

    `given` are parameters that the caller gives and a config must not. Raises UserError for an
    unknown or missing key, or a bool option whose value is not one.
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given and parameter.kind not in _COLLECTING
    }
    for key in options:
        if key not in parameters:
            raise UserError(f"{what} has no option '{key}'; {choices(key, parameters)}")
    filled: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name not in options and parameter.default is parameter.empty:
            raise UserError(f"{what} needs the option '{name}'; it has: {', '.join(options)}")
        filled[name] = options.get(name, parameter.default)
        if isinstance(parameter.default, bool) and not isinstance(filled[name], bool):
            raise UserError(f"'{name}' of {what} is {filled[name]!r}; it must be true or false")
    return filled


def check_positive(what: str, value: Any, least: int = 1) -> int:
    """`value`; UserError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{what} is {value!r}; it must be a whole number of at least {least}")
    return value


M = TypeVar("M", bound=type)

DENSE = "Linear"
# The arguments that the model gives at each place; a config must not.
_GIVEN = ("in_features", "out_features", "bias", "device", "dtype")
_DENSE_NAMES = ("dense", "linear", "Linear", "oneflow.nn.Linear", "torch.nn.Linear")

_layers: dict[str, type] = {DENSE: nn.Linear}
_short_names: dict[str, dict[str, Any]] = {name: {TARGET: DENSE} for name in _DENSE_NAMES}


def register_linear(short_name: str | None = None, **options: Any) -> Callable[[M], M]:
    """Decorator: LinearConfig can name this class, and `short_name` means it with these options.

    The class is built as `cls(in_features, out_features, bias=..., device=..., dtype=...,
    **options)`. Its optional attribute `option_readers` maps an option to a function that makes a
    config's value hashable. Raises ValueError where the name is taken.
    """

    def add(cls: M) -> M:
        if cls.__name__ in _layers or short_name in _short_names:
            raise ValueError(f"linear layer {cls.__name__} ('{short_name}') is registered twice")
        _layers[cls.__name__] = cls
        if short_name is not None:
            _short_names[short_name] = {TARGET: cls.__name__, **options}
        return cls

    return add


@dataclass(frozen=True)
class LinearConfig:
    """A linear layer without its size. Equal and hashable by value, defaults filled in."""

    target: str = DENSE
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, value: LinearLike) -> LinearConfig:
        """Read a config.

        `value` is None for a dense nn.Linear; a short name ("monarch", "blockdiag", "low_rank",
        "fbbfly", "pixelfly", "butterfly", "kaleidoscope", "dense"); a mapping {"_target_": CLASS,
        key: value, ...}, where CLASS is a short name, a class of monarch_flow.layers or its dotted
        path; or a LinearConfig. UserError names the nearest for an unknown class or key.
        """
        if isinstance(value, LinearConfig):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            if value not in _short_names:
                known = choices(value, _short_names)
                raise UserError(f"there is no linear layer '{value}'; {known}")
            value = _short_names[value]
        if not isinstance(value, Mapping):
            raise UserError(
                f"{value!r} is not a linear layer: give None, a short name or a mapping with "
                f"'{TARGET}'"
            )
        short = value.get(TARGET)
        if isinstance(short, str) and short in _short_names:
            value = {**_short_names[short], **{k: v for k, v in value.items() if k != TARGET}}
        layer, options = split_target(value, _layers, "linear layer")
        return cls(layer.__name__, _read_options(layer, options))

    @property
    def is_dense(self) -> bool:
        return self.target == DENSE

    def build(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> nn.Module:
        """A fresh layer; the config's option 'bias' overrides the argument. Raises UserError
        where the options are wrong or do not fit these widths."""
        options = dict(self.options)
        bias = options.pop("bias", bias)
        return _layers[self.target](
            in_features, out_features, bias=bias, device=device, dtype=dtype, **options
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `of` reads as this config, in plain values for JSON or YAML."""
        package = "oneflow.nn" if self.is_dense else "monarch_flow.layers"
        values = {
            name: value.to_dict() if hasattr(value, "to_dict") else value
            for name, value in self.options
        }
        return {TARGET: f"{package}.{self.target}", **values}


def names_linear(value: Mapping[str, Any]) -> bool:
    """Whether a mapping names a linear layer, whatever its options."""
    name = str(value.get(TARGET)).rpartition(".")[2]
    return name in _layers or name in _short_names


LinearLike = LinearConfig | Mapping[str, Any] | str | None


def _read_options(layer: type, options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    bias = {"bias": options.pop("bias")} if "bias" in options else {}
    if not isinstance(bias.get("bias", True), bool):
        raise UserError(f"'bias' of {layer.__name__} is {bias['bias']!r}; it must be true or false")
    filled = {**fill_options(options, layer, _GIVEN, layer.__name__), **bias}
    readers = getattr(layer, "option_readers", {})
    read = {name: readers.get(name, lambda x: x)(value) for name, value in filled.items()}
    for name, value in read.items():
        try:
            hash(value)
        except TypeError:
            raise UserError(
                f"option '{name}' of {layer.__name__} cannot be {value!r}: it takes one value"
            ) from None
    return tuple(sorted(read.items()))


def replace_linears(
    model: nn.Module,
    config: LinearLike = "monarch",
    include: str = "",
    exclude: str | None = None,
    kind: type = nn.Linear,
) -> list[str]:
    """Replace nn.Linear layers of a model by fresh structured ones, in place; return their names.

    The new layers have the old ones' bias or none, device, dtype and training mode, but not their
    weights: `monarch_flow.projection` makes those. A layer that stands in several places stays one.
    Subclasses of nn.Linear are left alone.

    Args:
        kind: nn.Linear, or nn.Conv2d for convolutions of one group, in their present layout.
        include, exclude: regular expressions that are searched for in names of
            `model.named_modules()`; the empty `include` is found in all.

    Raises:
        UserError: no layer matches, the model is a layer itself, its parameters are global, or an
            expression or the config is wrong.
    """
    chosen_config = LinearConfig.of(config)
    wanted, unwanted = compiled(include), compiled(_NEVER if exclude is None else exclude)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is kind and getattr(module, "groups", 1) == 1
    }
    if "" in linears:
        raise UserError(f"the model is one nn.{kind.__name__}: build the new layer in its place")
    chosen = {
        name: module
        for name, module in linears.items()
        if wanted.search(name) and not unwanted.search(name)
    }
    if not chosen:
        raise UserError(
            f"no nn.{kind.__name__} has a name that matches include={include!r} and not "
            f"exclude={exclude!r}; there are: {', '.join(linears) or 'none'}"
        )
    fresh = {id(old): _build_like(old, name, chosen_config) for name, old in chosen.items()}
    replace_modules(model, fresh)
    return list(chosen)


def replace_modules(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put modules in the places of those with these ids, in all places of each."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])


def compiled(expression: str) -> re.Pattern[str]:
    """A regular expression; UserError where it is none."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise UserError(f"{expression!r} is not a regular expression: {error}") from None


def _build_like(old: nn.Module, name: str, config: LinearConfig) -> nn.Module:
    if old.weight.is_global:
        raise UserError(f"{name} has global parameters: replace layers before to_global")
    return twins[type(old)](old, config).train(old.training)


def _linear_like(old: nn.Linear, config: LinearConfig) -> nn.Module:
    place = {"device": old.weight.device, "dtype": old.weight.dtype}
    return config.build(old.in_features, old.out_features, old.bias is not None, **place)


# What takes the place of a dense layer, by its class.
twins: dict[type, Callable[[Any, LinearConfig], nn.Module]] = {nn.Linear: _linear_like}
