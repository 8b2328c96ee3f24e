"""ViTAE at full width gives PyTorch's logits, losses, gradients and running statistics;
make_vitae_golden.py has computed them in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import create_model
from tests.monarch_flow.models import vitae_weights

GOLDEN = json.loads(Path(__file__).with_name("vitae_golden.json").read_text())
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Tiny": ("ViTAE_basic_Tiny", {}),
    "Tiny-Monarch": ("ViTAE_basic_Tiny", {"mlp_cfg": "monarch"}),
    "class token": (
        "ViTAE_basic_Base",
        {
            "img_size": GOLDEN["size"],
            "embed_dim": 48,
            "depth": 2,
            "num_heads": 4,
            "conv_groups": 12,
            "num_classes": 11,
        },
    ),
}


def _model(name: str) -> nn.Module:
    kind, arguments = CASES[name]
    model = create_model(kind, **arguments)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {key: list(shape) for key, shape in shapes.items()} == GOLDEN["cases"][name]["shapes"]
    state = vitae_weights.state(shapes.items())
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", list(CASES))
def test_logits_losses_and_gradients_equal_pytorchs(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_flow.models.performer.DROPOUT", 0.0)
    expected = GOLDEN["cases"][name][mode]
    model = _model(name).train(mode == "train")
    logits = model(flow.tensor(vitae_weights.images(GOLDEN["size"])))
    labels = vitae_weights.labels(classes=model.num_classes)
    loss = nn.functional.cross_entropy(logits, flow.tensor(labels))
    loss.backward()
    np.testing.assert_allclose(logits.numpy()[:, :8], expected["logits"], rtol=0, atol=1e-4)
    assert abs(logits.numpy().astype(np.float64).std(ddof=1) - expected["std"]) < 1e-4
    assert abs(float(loss.numpy()) - expected["loss"]) < 1e-5
    gradients = {
        key: parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    _check_digests(gradients, expected["gradients"])
    if mode == "train":
        running = {k: v.numpy() for k, v in model.named_buffers() if "running" in k}
        _check_digests(running, expected["running"])


def _check_digests(found: Mapping[str, np.ndarray], expected: Mapping[str, list[float]]) -> None:
    """Sum, sum of absolute values, and the first, middle and last entry."""
    assert set(found) == set(expected)
    sizes = np.array([np.abs(array).mean() for array in found.values()])
    # What is 0 but for rounding is compared with what is usual.
    least = 1e-5 * float(np.median(sizes))
    for key, array in found.items():
        flat = array.astype(np.float64).reshape(-1)
        total, absolute, *entries = expected[key]
        mean = absolute / flat.size
        assert abs(flat.sum() - total) <= 1e-4 * absolute + least * flat.size, key
        assert abs(np.abs(flat).sum() - absolute) <= 1e-4 * absolute + least * flat.size, key
        middle = [flat[index] for index in (0, flat.size // 2, flat.size - 1)]
        np.testing.assert_allclose(middle, entries, rtol=1e-3, atol=1e-3 * mean + least, err_msg=key)
