"""State dicts in the standard layout, from and into models of either layout, local and global."""

from __future__ import annotations

import logging

from oneflow_accel import layouts
from oneflow_accel.backends import Support
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest
from flowvision.models.resnet import BasicBlock, ResNet
from oneflow import nn


class Device:
    @staticmethod
    def supports(feature: str) -> Support:
        return Support(True, feature)


def build(channels_last: bool) -> nn.Module:
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    return layouts.to_channels_last(model, Device()) if channels_last else model


def random_state(model: nn.Module) -> dict[str, np.ndarray]:
    """Arrays in the standard layout for a model that is in it."""
    random = np.random.default_rng(0)
    return {
        name: np.array(random.integers(1, 99, tuple(tensor.shape)), dtype=tensor.numpy().dtype)
        for name, tensor in model.state_dict().items()
    }


def assert_state(model: nn.Module, state: dict[str, np.ndarray]) -> None:
    actual = layouts.standard_state_dict(model)
    assert list(actual) == list(state)
    for name, array in state.items():
        assert not actual[name].is_global
        assert actual[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(actual[name].numpy(), array, err_msg=name)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_state_goes_in_and_comes_out(channels_last: bool) -> None:
    state = random_state(build(False))
    model = build(channels_last)
    parameter = model.conv1.weight
    layouts.load_standard_state_dict(model, state)
    assert_state(model, state)
    assert model.conv1.weight is parameter
    wanted = state["conv1.weight"]
    np.testing.assert_array_equal(
        parameter.numpy(), wanted.transpose(0, 2, 3, 1) if channels_last else wanted
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_global_models(channels_last: bool) -> None:
    state = random_state(build(False))
    model = build(channels_last)
    model.to_global(placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    layouts.load_standard_state_dict(model, state)
    assert model.conv1.weight.is_global
    assert_state(model, state)


def test_other_dtypes_are_converted() -> None:
    model = build(True)
    state = {name: array.astype(np.float64) for name, array in random_state(build(False)).items()}
    layouts.load_standard_state_dict(model, state)
    assert model.conv1.weight.dtype == flow.float32
    assert model.bn1.num_batches_tracked.dtype == flow.int64
    np.testing.assert_array_equal(model.fc.weight.numpy(), state["fc.weight"])


def test_all_misfits_are_listed_in_one_error() -> None:
    model = build(True)
    before = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    state = random_state(build(False))
    del state["fc.bias"], state["layer1.0.bn1.weight"]
    state["head.weight"] = np.zeros(3)
    state["conv1.weight"] = state["conv1.weight"].transpose(0, 2, 3, 1)
    state["fc.weight"] = np.zeros((1000, 512))
    with pytest.raises(UserError, match="do not fit ResNet") as caught:
        layouts.load_standard_state_dict(model, state)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: layer1.0.bn1.weight, fc.bias",
        "  unexpected: head.weight",
        "  of another shape: "
        "conv1.weight: (64, 7, 7, 3) in the weights, (64, 3, 7, 7) in the model, "
        "fc.weight: (1000, 512) in the weights, (3, 512) in the model",
    ]
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)


def test_not_strict_takes_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    model = build(False)
    bias = model.fc.bias.numpy()
    state = random_state(model)
    del state["fc.bias"]
    state["head.weight"] = np.zeros(3)
    with caplog.at_level(logging.WARNING, "oneflow_accel"):
        layouts.load_standard_state_dict(model, state, strict=False)
    assert "missing: fc.bias" in caplog.text
    assert "unexpected: head.weight" in caplog.text
    np.testing.assert_array_equal(model.fc.weight.numpy(), state["fc.weight"])
    np.testing.assert_array_equal(model.fc.bias.numpy(), bias)
    state["fc.weight"] = np.zeros((1000, 512))
    with pytest.raises(UserError, match="of another shape"):
        layouts.load_standard_state_dict(model, state, strict=False)


def test_old_checkpoints_have_no_batch_counters() -> None:
    model = build(False)
    state = random_state(model)
    old = {name: array for name, array in state.items() if "num_batches" not in name}
    layouts.load_standard_state_dict(model, old)
    np.testing.assert_array_equal(model.bn1.bias.numpy(), state["bn1.bias"])


def test_a_layer_under_two_names() -> None:
    shared = nn.Conv2d(3, 3, (2, 1))
    model = layouts.to_channels_last(nn.Sequential(shared, nn.ReLU(), shared), Device())
    state = layouts.standard_state_dict(model)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "0.weight": (3, 3, 2, 1),
        "0.bias": (3,),
        "2.weight": (3, 3, 2, 1),
        "2.bias": (3,),
    }


@pytest.mark.parametrize("channels_last", [False, True])
def test_arrays_that_go_with_parameters(channels_last: bool) -> None:
    model = build(channels_last)
    standard = np.arange(64 * 3 * 7 * 7.0).reshape(64, 3, 7, 7)
    array = layouts.layout_array("conv1.weight", standard, model)
    assert array.shape == tuple(model.conv1.weight.shape)
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(layouts.standard_array("conv1.weight", array, model), standard)
    for name, other in (("fc.weight", np.ones((3, 512))), ("conv1.weight", np.array(5.0))):
        assert layouts.layout_array(name, other, model) is other
        assert layouts.standard_array(name, other, model) is other
