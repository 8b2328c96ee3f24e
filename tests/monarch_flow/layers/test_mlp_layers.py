"""Mlp and build_mlp: function and keys. The counts of table 3.8: configs/test_config_layers.py."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import Mlp, MonarchLinear, build_mlp, dropout
from tests.tolerances import assert_close


@pytest.mark.parametrize("drop_btw_fcs", [True, False])
@pytest.mark.parametrize("kind", ["dense", "monarch"])
def test_function(kind: str, drop_btw_fcs: bool) -> None:
    """fc2(gelu(fc1 x)) in float64, with the exact GELU."""
    erf = pytest.importorskip("scipy.special").erf
    mlp = Mlp(10, 24, kind, kind, drop_btw_fcs=drop_btw_fcs, drop=0.5).eval()
    x = np.random.default_rng(0).standard_normal((2, 3, 10)).astype(np.float32)

    def applied(layer: nn.Module, x: np.ndarray) -> np.ndarray:
        weight = layer.weight if kind == "dense" else layer.dense()
        return x @ weight.numpy().astype(float).T + layer.bias.numpy()

    hidden = applied(mlp.fc1, x)
    expected = applied(mlp.fc2, hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))))
    assert_close(mlp(flow.tensor(x)).numpy(), expected, reduced=24)


def test_keys() -> None:
    dense = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert sorted(Mlp(8, 16).state_dict()) == dense
    assert sorted(Mlp(8, 16, drop=0.5).state_dict()) == dense
    mlp = build_mlp({"_target_": "MlpCustom", "linear1_cfg": "monarch"}, 8, 16)
    assert sorted(mlp.state_dict()) == ["fc1.bias", "fc1.blkdiag1", "fc1.blkdiag2", *dense[2:]]


def test_dropout_places() -> None:
    mlp = Mlp(8, 16, drop=0.25)
    assert (mlp.drop1.p, mlp.drop2.p) == (0.25, 0.25)
    mlp = Mlp(8, 16, drop=0.25, drop_btw_fcs=False)
    assert (type(mlp.drop1), mlp.drop2.p) == (nn.Identity, 0.25)
    with pytest.raises(UserError, match="between 0 and 1"):
        dropout(1.5)


def test_build_mlp() -> None:
    assert type(build_mlp(None, 8, 16).fc1) is nn.Linear
    assert isinstance(build_mlp("monarch", 8, 16).fc2, MonarchLinear)
    config = {
        "_target_": "src.models.layers.mlp.MlpCustom",
        "linear1_cfg": {"_target_": "monarch", "nblocks": 2},
        "linear2_cfg": {"_target_": "monarch", "nblocks": 2},
        "drop": 0.1,
    }
    mlp = build_mlp(config, 8, 16, drop=0.3)
    assert isinstance(mlp.fc2, MonarchLinear)
    assert (mlp.fc1.nblocks, mlp.fc2.in_features, mlp.fc2.out_features) == (2, 16, 8)
    # The model's rate goes before the config's.
    assert mlp.drop1.p == 0.3


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"_target_": "MlpCostum"}, "did you mean 'MlpCustom'"),
        ({"_target_": "MlpCustom", "linear_cfg": None}, "did you mean 'linear[12]_cfg'"),
        ({"_target_": "MlpCustom", "linear1_cfg": "monark"}, "did you mean 'monarch'"),
        (4, "mapping"),
        ("MlpCustom", "no linear layer"),
        ({"linear1_cfg": None}, "'_target_'"),
    ],
)
def test_wrong_configs(config: object, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_mlp(config, 8, 16)
