"""The two-layer perceptron of transformers, dense or with structured layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.inference import bfloat16_container

import oneflow as flow
from oneflow import nn

from monarch_flow.layers.config import LinearConfig, LinearLike
from monarch_flow.layers.drop_elements import dropout
from monarch_flow.layers.targets import TARGET, fill_options, split_target

Activation = Callable[[], nn.Module]


class _Perceptron(nn.Module):
    """fc1, act, drop1, fc2 and drop2 in a row: (..., in_features) to (..., out_features)."""

    def __init__(
        self,
        sizes: tuple[int, int | None, int | None],
        layers: tuple[LinearConfig, LinearConfig],
        act: nn.Module,
        drops: tuple[float, float],
        **options: Any,
    ) -> None:
        super().__init__()
        in_features, hidden_features, out_features = sizes
        hidden_features, out_features = hidden_features or in_features, out_features or in_features
        self.fc1 = layers[0].build(in_features, hidden_features, **options)
        self.act = act
        self.drop1 = dropout(drops[0])
        self.fc2 = layers[1].build(hidden_features, out_features, **options)
        self.drop2 = dropout(drops[1])

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


@bfloat16_container
class Mlp(_Perceptron):
    """A perceptron with dense layers; None as a width means in_features. A pair as `drop` gives the
    rates after the activation and after fc2."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Activation = nn.GELU,
        drop: float | tuple[float, float] = 0.0,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            (in_features, hidden_features, out_features),
            (LinearConfig(), LinearConfig()),
            act_layer(),
            drop if isinstance(drop, tuple) else (drop, drop),
            bias=bias,
            device=device,
            dtype=dtype,
        )


@bfloat16_container
class MlpCustom(_Perceptron):
    """Mlp whose layers are chosen by config, see `LinearConfig.of`; None for dense.

    `act_fn` overrides `act_layer`, and `drop_btw_fcs` says whether there is dropout after the
    activation too. Raises UserError where a config is wrong.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Activation = nn.GELU,
        act_fn: Callable[[flow.Tensor], flow.Tensor] | None = None,
        drop: float = 0.0,
        drop_btw_fcs: bool = True,
        linear1_cfg: LinearLike = None,
        linear2_cfg: LinearLike = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            (in_features, hidden_features, out_features),
            (LinearConfig.of(linear1_cfg), LinearConfig.of(linear2_cfg)),
            act_layer() if act_fn is None else _Function(act_fn),
            (drop if drop_btw_fcs else 0.0, drop),
            device=device,
            dtype=dtype,
        )


class _Function(nn.Module):
    def __init__(self, function: Callable[[flow.Tensor], flow.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.function(x)


_MLPS: dict[str, type[nn.Module]] = {"Mlp": Mlp, "MlpCustom": MlpCustom}
# The arguments that the model gives; a config must not.
_GIVEN = ("in_features", "hidden_features", "out_features", "act_layer", "device", "dtype")


def build_mlp(
    mlp_cfg: Mapping[str, Any] | None,
    in_features: int,
    hidden_features: int | None = None,
    out_features: int | None = None,
    *,
    act_layer: Activation = nn.GELU,
    drop: float = 0.0,
    device: Any = None,
    dtype: Any = None,
) -> nn.Module:
    """The perceptron that a model's `mlp_cfg` names.

    `mlp_cfg` is None for a dense Mlp, or {"_target_": "monarch_flow.layers.MlpCustom",
    "linear1_cfg": ..., "linear2_cfg": ..., ...}; a 'drop' in it overrides the model's. UserError
    names the nearest for an unknown class or key.
    """
    place = {"act_layer": act_layer, "device": device, "dtype": dtype}
    sizes = (in_features, hidden_features, out_features)
    if mlp_cfg is None:
        return Mlp(*sizes, drop=drop, **place)
    if not isinstance(mlp_cfg, Mapping):
        raise UserError(f"mlp_cfg is {mlp_cfg!r}: give null or a mapping with '{TARGET}'")
    mlp, options = split_target(mlp_cfg, _MLPS, "MLP")
    filled = fill_options(options, mlp, _GIVEN, mlp.__name__)
    return mlp(*sizes, **{**filled, "drop": drop}, **place)
