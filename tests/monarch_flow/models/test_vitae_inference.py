"""ViTAE prepared for inference: nothing of its batch norms is left, and logits stay numpy's."""

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
from tests.monarch_flow.models import numpy_vitae, seeded_vision
from tests.tolerances import TOLERANCES, Tolerance, assert_close

# Widths, groups and dilations of the published models, fewer cells and classes. Base has 4 channels
# in a group, and 16 inside its branch.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Tiny": ("ViTAE_basic_Tiny", {"depth": 2, "num_classes": 9, "img_size": 48}, 64),
    "Tiny, Monarch": (
        "ViTAE_basic_Tiny",
        {"depth": 1, "num_classes": 9, "img_size": 32, "mlp_cfg": "monarch"},
        64,
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
        12,
    ),
}


class Forward(nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, images: flow.Tensor) -> flow.Tensor:
        return self.model(images)


@pytest.mark.parametrize("name", list(CASES))
def test_logits_equal_numpy(name: str) -> None:
    kind, arguments, groups = CASES[name]
    model = create_model(kind, **arguments).eval()
    state = numpy_vitae.state((k, tuple(v.shape)) for k, v in model.state_dict().items())
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    images = seeded_vision.images({"in_chans": 3, "img_size": model.img_size})
    function = numpy_vitae.patch_vitae if name == "Base" else numpy_vitae.vitae
    expected = function(
        {key: array.astype(np.float64) for key, array in state.items()},
        images.astype(np.float64),
        arguments["depth"],
        4,
        groups,
    )
    x = flow.tensor(images.astype(np.float32))
    with flow.no_grad():
        prepared = prepare(model)
        logits = prepared(x).numpy()
        assert_close(logits, expected, reduced=1000)
        # One operator in place of each convolution and its batch norm; the rest is as it was.
        assert_close(logits, model(x).numpy(), reduced=1000)
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
