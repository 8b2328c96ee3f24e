"""The same weights and images give timm's logits and gradients (make_golden.py: torch, float64)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.models import MlpMixer, VisionTransformer, create_model
from tests.monarch_flow.models import seeded_vision
from tests.tolerances import assert_close

GOLDEN = json.loads(Path(__file__).with_name("timm_vision.json").read_text())


def _build(case: Mapping[str, Any]) -> nn.Module:
    arguments = {key: value for key, value in case.items() if key != "kind"}
    return (VisionTransformer if case["kind"] == "vit" else MlpMixer)(**arguments)


def _shapes(model: nn.Module) -> list[list[Any]]:
    return [[name, list(value.shape)] for name, value in model.state_dict().items()]


def _fill(model: nn.Module) -> nn.Module:
    state = seeded_vision.state(
        (name, tuple(value.shape)) for name, value in model.state_dict().items()
    )
    model.load_state_dict({name: flow.tensor(array) for name, array in state.items()})
    return model


@pytest.mark.parametrize("case", list(seeded_vision.CASES))
def test_logits_and_gradients_equal_timms(case: str) -> None:
    golden, dtype = GOLDEN["small"][case], "float64"
    model = _build(seeded_vision.CASES[case])
    # In this order, too.
    assert _shapes(model) == golden["shapes"]
    model = _fill(model).double()
    images = seeded_vision.images(seeded_vision.CASES[case]).astype(dtype)
    logits = model(flow.tensor(images))
    expected = np.array(golden["logits"])
    assert 0.3 < np.abs(expected).max() < 30
    # Some 30 operations, each of sums over up to 300 terms.
    assert_close(logits.numpy(), expected, dtype=dtype, reduced=1000)

    weights = seeded_vision.probe("logits", tuple(logits.shape)).astype(dtype)
    (logits * flow.tensor(weights)).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy().astype(np.float64)
        found[name] = [np.linalg.norm(gradient), (gradient * _probe(name, gradient)).sum()]
    assert list(found) == list(golden["gradients"])
    largest = max(norm for norm, _ in golden["gradients"].values())
    for name, (norm, product) in golden["gradients"].items():
        # Some gradients are sums of large terms that cancel: a layer norm does not see a bias.
        allowed = 1e-9 * max(norm, 0.01 * largest)
        assert np.abs(np.array(found[name]) - [norm, product]).max() < allowed, name


def _probe(name: str, gradient: np.ndarray) -> np.ndarray:
    return seeded_vision.probe(name, gradient.shape)


def test_full_size_equals_timm() -> None:
    """Weights of 22.1 million numbers, one image; the name there is timm's."""
    golden = GOLDEN["full"]["vit_small_patch16_224"]
    model = create_model("deit_small_patch16_224").eval()
    assert _shapes(model) == golden["shapes"]
    _fill(model)
    case = {"in_chans": 3, "img_size": [224, 224]}
    with flow.no_grad():
        logits = model(flow.tensor(seeded_vision.images(case, 1))).numpy()
    expected = np.array(golden["logits"])
    assert_close(logits[0, : len(expected)], expected, reduced=3000)
    assert abs(logits.std() - golden["std"]) < 1e-5 * golden["std"]
