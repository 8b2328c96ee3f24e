"""Narrow ViTAEs have names, logits and gradients of the authors' code (make_vitae_official.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.models import create_model
from tests.monarch_flow.models import seeded_vision, spec_fixture
from tests.monarch_flow.models.test_vitae_golden import assert_same

OFFICIAL = json.loads(Path(__file__).with_name("vitae_official.json").read_text())
_COMMON: dict[str, Any] = {
    "img_size": 32,
    "depth": 2,
    "num_heads": 3,
    "conv_groups": 4,
    "num_classes": 6,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "performers": (
        "ViTAE_basic_Tiny",
        {**_COMMON, "embed_dims": [8, 8, 12], "token_dims": [8, 16, 24]},
    ),
    "patches": ("ViTAE_basic_Base", {**_COMMON, "embed_dim": 24, "patch_size": 8}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_names_logits_and_gradients_are_the_authors(case: str) -> None:
    expected = OFFICIAL[case]
    name, arguments = CASES[case]
    model = create_model(name, **arguments).eval()
    # In this order, too.
    shapes = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert shapes == expected["shapes"]
    state = spec_fixture.state((key, tuple(shape)) for key, shape in shapes)
    model.load_state_dict({key: flow.tensor(array) for key, array in state.items()}, strict=True)
    logits = model(flow.tensor(spec_fixture.images(32)))
    assert np.abs(expected["logits"]).max() > 0.1
    np.testing.assert_allclose(logits.numpy(), expected["logits"], rtol=0, atol=1e-5)
    probe = seeded_vision.probe("logits", tuple(logits.shape)).astype(np.float32)
    (logits * flow.tensor(probe)).sum().backward()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == set(expected["gradients"])
    for key, parameter in trained.items():
        assert_same(key, parameter.grad.numpy(), expected["gradients"][key])
