"""What the tests of inference share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn


def _randomize(model: nn.Module) -> nn.Module:
    generator = np.random.default_rng(5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            variance = generator.uniform(0.25, 4.0, channels)
            # A channel that was the same everywhere in training, and a large one.
            variance[0], variance[-1] = 0.0, 50.0
            arrays = {"running_mean": generator.normal(0.0, 0.2, channels), "running_var": variance}
            if module.affine:
                # eps alone is left of a variance of zero: 316 times the scale.
                weight = generator.normal(0.5, 0.5, channels)
                weight[0] *= 0.003
                arrays |= {"weight": weight, "bias": generator.normal(0.0, 0.2, channels)}
            for name, array in arrays.items():
                tensor = getattr(module, name)
                tensor.data.copy_(flow.tensor(array.astype(np.float32)))
    return model.eval()


@pytest.fixture
def randomize() -> Callable[[nn.Module], nn.Module]:
    return _randomize
