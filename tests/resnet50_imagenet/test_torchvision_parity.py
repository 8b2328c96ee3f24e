"""torchvision's ResNet50 logits (golden/make_torchvision_resnet.py, float64), in both layouts."""

from __future__ import annotations

import json
from pathlib import Path

from oneflow_accel import layouts
from oneflow_accel.backends import resolve

import flowvision
import numpy as np
import oneflow as flow
import pytest
from safetensors.numpy import save_file

from flow_train.checkpoint.weights import read_weights
from tests.golden import seeded_weights

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "torchvision_resnet50.json"
# The project's promise for logits of order 1 in float32, after 53 convolutions.
LARGEST_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def weights_file(golden: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = [(name, tuple(shape)) for name, shape in golden["shapes"]]
    path = tmp_path_factory.mktemp("weights") / "resnet50.safetensors"
    save_file(seeded_weights.resnet_state(shapes), path)
    return path


@pytest.mark.parametrize("channels_last", [False, True])
def test_logits_equal_torchvisions(golden: dict, weights_file: Path, channels_last: bool) -> None:
    model = flowvision.models.resnet50().eval()
    expected = np.array(golden["logits"])
    pictures = seeded_weights.images(len(expected), golden["image_size"])
    if channels_last:
        backend = resolve("cpu").backend
        if not backend.supports("nhwc"):
            pytest.skip(backend.supports("nhwc").reason)
        layouts.to_channels_last(model, backend)
        pictures = np.ascontiguousarray(pictures.transpose(0, 2, 3, 1))
    layouts.load_standard_state_dict(model, read_weights(weights_file))
    with flow.no_grad():
        logits = model(flow.tensor(pictures)).numpy()
    assert 0.5 < np.abs(expected).max() < 10
    assert np.abs(logits - expected).max() < LARGEST_DIFFERENCE
