"""From sparse to dense in the middle of real training: losses and moments go on."""

from __future__ import annotations

import oneflow_accel

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from monarch_flow.layers import MonarchLinear
from monarch_flow.projection import (
    densify_training_state,
    monarch_to_dense,
    structured_layers,
)


def test_estimates_agree_with_the_moments_of_dense_gradients_in_real_training() -> None:
    """AdamW's moments of two Monarch layers, beside the averages that their dense gradients, worked
    out in numpy, would have had. The first moment is an orthogonal projection of those: its cosine
    with them is its share of their length. The second is an estimate: within a factor of 2 for most
    entries, and it knows the large from the small."""
    oneflow_accel.select_device()
    flow.manual_seed(0)
    random = np.random.default_rng(0)
    model = nn.Sequential(MonarchLinear(64, 128), nn.ReLU(), MonarchLinear(128, 16))
    rule = random.standard_normal((64, 16)).astype(np.float32) / 8
    optimizer = flow.optim.AdamW(model.parameters(), lr=3e-3)
    first, second = [0.0, 0.0], [0.0, 0.0]
    for _ in range(150):
        x = random.standard_normal((64, 64)).astype(np.float32)
        target = np.tanh(x @ rule)
        weights = [
            monarch_to_dense(layer.blkdiag1.numpy(), layer.blkdiag2.numpy())
            for layer in (model[0], model[2])
        ]
        before = x @ weights[0].T + model[0].bias.numpy()
        hidden = np.maximum(before, 0)
        out = hidden @ weights[1].T + model[2].bias.numpy()
        step = 2 * (out - target) / out.size
        dense = [((step @ weights[1]) * (before > 0)).T @ x, step.T @ hidden]
        for index, gradient in enumerate(dense):
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.999 * second[index] + 0.001 * gradient**2
        ((model(flow.tensor(x)) - flow.tensor(target)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.state_dict()["state"]
    arrays = {
        f"{key}/{name}": kept[index][key].numpy()
        for index, (name, _) in enumerate(model.named_parameters())
        for key in ("exp_avg", "exp_avg_sq")
    }
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    new = densify_training_state(state, arrays, structured_layers(model))
    for index, name in enumerate(("0.weight", "2.weight")):
        found = new.optimizer[f"exp_avg/{name}"]
        length = np.linalg.norm(found) / np.linalg.norm(first[index])
        cosine = (found * first[index]).sum() / np.linalg.norm(found)
        cosine /= np.linalg.norm(first[index])
        assert cosine > 0.2
        # As far as the factors stood still meanwhile.
        assert cosine == pytest.approx(length, rel=0.15)
        ratio = new.optimizer[f"exp_avg_sq/{name}"] / second[index]
        low, median, high = np.quantile(ratio, (0.1, 0.5, 0.9))
        assert low > 0.4
        assert 0.7 < median < 1.5
        assert high < 2.5
        logarithms = np.log(new.optimizer[f"exp_avg_sq/{name}"]), np.log(second[index])
        assert np.corrcoef(*(values.ravel() for values in logarithms))[0, 1] > 0.75
