"""Which linear layer stands in a place: LinearConfig, and the layers it can name.

    LinearConfig.of("monarch").build(768, 3072)
    LinearConfig.of({"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 8})

A layer joins them with `register_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from oneflow_accel.errors import UserError

from oneflow import nn

from monarch_flow.layers.targets import TARGET, choices, fill_options, split_target

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
        "fbbfly", "pixelfly", "dense"); a mapping {"_target_": CLASS, key: value, ...}, where CLASS
        is a short name, a class of monarch_flow.layers or its dotted path; or a LinearConfig.
        UserError names the nearest for an unknown class or key.
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
                f"{value!r} is no linear layer: give None, a short name or a mapping with "
                f"'{TARGET}'"
            )
        short = value.get(TARGET)
        if isinstance(short, str) and short in _short_names:
            value = {**value, **_short_names[short], **_without_target(value)}
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
        values = {name: _plain(value) for name, value in self.options}
        return {TARGET: f"{package}.{self.target}", **values}


LinearLike = LinearConfig | Mapping[str, Any] | str | None


def _without_target(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item for key, item in value.items() if key != TARGET}


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


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value
