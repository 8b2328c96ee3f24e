"""The moving average of the parameters, against numpy in float64."""

from __future__ import annotations

import oneflow_accel
from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest
from oneflow import nn

from flow_train.optim import ExponentialMovingAverage
from tests.tolerances import assert_close


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    oneflow_accel.select_device()


def values_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def change(model: nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    with flow.no_grad():
        for parameter in model.parameters():
            new = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(flow.tensor(new))
    return values_of(model)


@pytest.mark.parametrize("use_num_updates", [False, True])
def test_recurrence(use_num_updates):
    rng = np.random.default_rng(0)
    model = nn.Linear(3, 4)
    ema = ExponentialMovingAverage(model, 0.7, use_num_updates)
    expected = {name: value.astype(np.float64) for name, value in values_of(model).items()}
    for n in range(1, 31):
        for name, value in change(model, rng).items():
            d = min(0.7, (1 + n) / (10 + n)) if use_num_updates else 0.7
            expected[name] += (1 - d) * (value - expected[name])
        ema.update(model)
    for name, value in expected.items():
        assert_close(ema.shadow[name].numpy(), value, reduced=30)


def test_swap_gives_the_average_and_gives_back():
    model = nn.Linear(3, 4)
    ema = ExponentialMovingAverage(model, 0.5)
    own = change(model, np.random.default_rng(1))
    ema.update(model)

    def evaluate_and_fail() -> None:
        with ema.swapped_in(model):
            for name, value in values_of(model).items():
                np.testing.assert_array_equal(value, ema.shadow[name].numpy())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        evaluate_and_fail()
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, own[name])
    # The average is no alias of what the swap put in.
    assert np.abs(ema.shadow["weight"].numpy() - own["weight"]).max() > 0.01
    ema.copy_to(model)
    np.testing.assert_array_equal(values_of(model)["weight"], ema.shadow["weight"].numpy())


def test_a_resumed_average_goes_on_bit_for_bit():
    def run(steps: range, ema: ExponentialMovingAverage, model: nn.Module) -> None:
        for step in steps:
            change(model, np.random.default_rng(step))
            ema.update(model)

    model = nn.Linear(3, 4)
    whole = ExponentialMovingAverage(model, 0.9, use_num_updates=True)
    run(range(6), whole, model)
    arrays = {name: value.copy() for name, value in whole.state_arrays().items()}
    state = whole.state()
    assert set(arrays) == {"ema/weight", "ema/bias"}
    assert state == {"decay": 0.9, "use_num_updates": True, "num_updates": 6}
    run(range(6, 10), whole, model)
    other = nn.Linear(3, 4)
    resumed = ExponentialMovingAverage(other, 0.9, use_num_updates=True)
    resumed.load({**arrays, "model/weight": np.zeros(1)}, state)
    run(range(6, 10), resumed, other)
    for name, value in whole.state_arrays().items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(resumed.state_arrays()[name], value)


def test_what_does_not_fit_is_named():
    model = nn.Linear(3, 4)
    ema = ExponentialMovingAverage(model, 0.9)
    arrays = ema.state_arrays()
    with pytest.raises(CheckpointError, match="no moving average of bias"):
        ema.load({"ema/weight": arrays["ema/weight"]}, {})
    with pytest.raises(CheckpointError, match=r"weight has shape \(2, 2\) .*\(4, 3\)"):
        ema.load({**arrays, "ema/weight": np.zeros((2, 2))}, {})
    with pytest.raises(KeyError, match="not those averaged: bias"):
        ema.update(nn.Linear(3, 4, bias=False))
    with pytest.raises(ValueError, match="not from 0 to 1"):
        ExponentialMovingAverage(model, 1.5)


def test_a_model_that_became_dense_goes_on_with_its_average():
    structured = nn.Module()
    structured.fc = nn.Module()
    structured.fc.blkdiag1 = nn.Parameter(flow.ones(2, 2, 2))
    structured.fc.bias = nn.Parameter(flow.ones(4))
    ema = ExponentialMovingAverage(structured, 0.5, use_num_updates=True)
    change(structured, np.random.default_rng(0))
    ema.update(structured)
    bias = ema.shadow["fc.bias"].numpy().copy()
    dense, averaged = nn.Module(), np.arange(16.0).reshape(4, 4)
    dense.fc = nn.Linear(4, 4)
    ema.replace(dense, {"fc.weight": averaged})
    assert ema.num_updates == 1
    assert set(ema.shadow) == {"fc.weight", "fc.bias"}
    np.testing.assert_array_equal(ema.shadow["fc.weight"].numpy(), averaged)
    np.testing.assert_array_equal(ema.shadow["fc.bias"].numpy(), bias)
    ema.update(dense)
    weight = dense.fc.weight.detach().numpy()
    d = min(0.5, 3 / 12)
    assert_close(ema.shadow["fc.weight"].numpy(), averaged + (1 - d) * (weight - averaged))


def test_running_statistics_are_averaged_and_other_buffers_are_left_alone():
    """Against numpy in float64; the count of batches and what is frozen stay as they are."""
    rng = np.random.default_rng(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    model[0].bias.requires_grad_(False)
    model.register_buffer("constant", flow.ones(4))
    ema = ExponentialMovingAverage(model, 0.9)
    statistics = {f"{layer}.running_{kind}" for layer in (1, 2) for kind in ("mean", "var")}
    assert set(ema.shadow) == {"0.weight", "1.weight", "1.bias"} | statistics
    expected = {name: 0.0 if "mean" in name else np.ones(3) for name in statistics}
    for _ in range(5):
        model(flow.tensor(rng.standard_normal((8, 2)).astype(np.float32)))
        ema.update(model)
        own = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        for name in statistics:
            expected[name] = expected[name] + 0.1 * (own[name] - expected[name])
    for name in statistics:
        assert_close(ema.shadow[name].numpy(), expected[name], reduced=5)
    with ema.swapped_in(model):
        for name, value in model.state_dict().items():
            wanted = expected.get(name, own[name])
            assert_close(value.numpy(), wanted, reduced=5)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), own[name])
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    assert set(ExponentialMovingAverage(plain, 0.9).shadow) == {"weight", "bias"}
