"""ViTAE prepared for inference: nothing of its batch norms is left, and logits stay."""

from __future__ import annotations

from typing import Any

import oneflow_accel
from oneflow_accel.inference import prepare
from oneflow_accel.inference.folding import InferenceConv2d

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import create_model
from monarch_flow.models.vitae import MapConv2d
from tests.monarch_flow.models import spec_fixture
from tests.oneflow_accel.kernels.harness import Forward
from tests.tolerances import TOLERANCES, Tolerance, assert_close

# Widths, groups and dilations of the published models, fewer cells and classes. Base has 4 channels
# in a group, and 16 inside its branch.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Tiny": ("ViTAE_basic_Tiny", {"depth": 2, "num_classes": 9, "img_size": 48}),
    "Tiny, Monarch": (
        "ViTAE_basic_Tiny",
        {"depth": 1, "num_classes": 9, "img_size": 32, "mlp_cfg": "monarch"},
    ),
    "Base": (
        "ViTAE_basic_Base",
        {
            "depth": 2,
            "embed_dim": 48,
            "num_heads": 4,
            "conv_groups": 12,
            "num_classes": 9,
            "img_size": 64,
        },
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_logits_equal_those_of_the_model(name: str) -> None:
    kind, arguments = CASES[name]
    model = create_model(kind, **arguments).eval()
    state = spec_fixture.state((k, tuple(v.shape)) for k, v in model.state_dict().items())
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    x = flow.tensor(spec_fixture.images(arguments["img_size"]))
    with flow.no_grad():
        expected = model(x).numpy()
        assert 0.1 < np.abs(expected).max() < 30
        prepared = prepare(model)
        logits = prepared(x).numpy()
        # One operator in place of each convolution and its batch norm; the rest is as it was.
        assert_close(logits, expected, reduced=1000)
        np.testing.assert_array_equal(Forward(prepared)(x).numpy(), logits)
    for module in prepared.modules():
        assert not isinstance(module, (nn.BatchNorm2d, MapConv2d))
    assert not np.array_equal(logits, expected)

    support = oneflow_accel.current_backend().supports("bfloat16_inference")
    if not support:
        pytest.skip(support.reason)
    with flow.no_grad():
        prepared = prepare(model, flow.bfloat16)
        found = prepared(x).numpy()
        np.testing.assert_array_equal(Forward(prepared)(x).numpy(), found)
    convs = [module for module in prepared.modules() if isinstance(module, InferenceConv2d)]
    folded = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convs) == len(folded)
    assert all(conv.weight.dtype == flow.bfloat16 for conv in convs)
    # One after the other: some 8 roundings in each reduction cell and 12 in each normal cell.
    table, factor = TOLERANCES["bfloat16"], np.sqrt(3 * 8 + 12 * arguments["depth"])
    assert_close(
        found,
        expected,
        override=Tolerance(table.rtol * factor, table.atol * factor),
        reason="roundings one after the other, each of bfloat16's size in the table",
    )
