"""ViTAE against PyTorch in float64 (make_vitae_golden.py): scores, loss and all gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import create_model
from tests.monarch_flow.models import spec_fixture

GOLDEN = json.loads(Path(__file__).with_name("vitae_golden.json").read_text())
TOY = {"embed_dim": 48, "depth": 2, "num_heads": 4, "conv_groups": 12, "num_classes": 11}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Tiny": ("ViTAE_basic_Tiny", {}),
    "Tiny-Monarch": ("ViTAE_basic_Tiny", {"mlp_cfg": "monarch"}),
    "class token": ("ViTAE_basic_Base", {"img_size": GOLDEN["size"], **TOY}),
}
# Float32 through some fifty layers, relative to the mean size of a tensor's entries.
TOLERANCE = 1e-3
# What rounding leaves of the gradient of a bias before a batch norm, which is 0. The smallest
# gradients that are something have a mean size of 1e-4.
NOTHING = 3e-7


def digest(values: np.ndarray) -> np.ndarray:
    """As make_vitae_golden.py's: sum, absolute sum, first, middle and last entry."""
    flat = values.astype(np.float64).reshape(-1)
    return np.array([flat.sum(), np.abs(flat).sum(), flat[0], flat[flat.size // 2], flat[-1]])


def assert_same(name: str, values: np.ndarray, expected: list[float]) -> None:
    terms = np.array([values.size, values.size, 1, 1, 1])
    # Errors of a sum add up like a random walk; an entry may be larger than the mean.
    allowed = TOLERANCE * (np.sqrt(terms) * expected[1] / values.size + np.abs(expected))
    difference = np.abs(digest(values) - expected)
    assert (difference <= allowed + terms * NOTHING).all(), f"{name}: {digest(values)}, {expected}"


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("case", list(MODELS))
def test_gradients_are_those_of_pytorch(case: str, mode: str) -> None:
    name, arguments = MODELS[case]
    expected = GOLDEN["cases"][case]
    model = create_model(name, **arguments).train(mode == "train")
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.eval()
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert shapes == expected["shapes"]
    state = spec_fixture.state([(key, tuple(shape)) for key, shape in shapes.items()])
    model.load_state_dict({key: flow.tensor(value) for key, value in state.items()})
    found = expected[mode]
    scores = model(flow.tensor(spec_fixture.images(GOLDEN["size"])))
    loss = nn.functional.cross_entropy(scores, flow.tensor(GOLDEN["labels"]))
    loss.backward()
    np.testing.assert_allclose(scores.numpy()[:, :8], found["logits"], rtol=0, atol=1e-4)
    assert loss.item() == pytest.approx(found["loss"], rel=1e-5)
    gradients = {key: value.grad for key, value in model.named_parameters() if value.requires_grad}
    assert gradients.keys() == found["gradients"].keys()
    for key, gradient in gradients.items():
        assert_same(key, gradient.numpy(), found["gradients"][key])
    buffers = {key: value for key, value in model.named_buffers() if "running" in key}
    for key, statistics in found.get("running", {}).items():
        assert_same(key, buffers[key].numpy(), statistics)
