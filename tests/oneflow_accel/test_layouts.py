"""Channels last: each family of models in both layouts, and what is refused."""

from __future__ import annotations

import copy
import importlib

from oneflow_accel import layouts
from oneflow_accel.backends import Backend, Support, resolve
from oneflow_accel.errors import UserError
from oneflow_accel.layouts.rules import RULES, class_name

import flowvision
import numpy as np
import oneflow as flow
import pytest
from flowvision.models.resnet import BasicBlock, ResNet
from flowvision.models.vgg import VGG, make_layers
from oneflow import nn

from tests.oneflow_accel.kernels.harness import Forward
from tests.tolerances import assert_close

# Terms that the widest convolution of these models sums up: 3 x 3 x 512.
REDUCED = 4608

FAMILIES = {
    "densenet121": 64,
    "efficientnet_b0": 64,
    "googlenet": 64,
    "inception_v3": 299,
    "mnasnet0_5": 64,
    "mobilenet_v3_small": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "se_resnet50": 224,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64,
}


class Device:
    """A backend as far as the conversion asks it."""

    def __init__(self, support: Support) -> None:
        self.supports = {"nhwc": support}.__getitem__


YES = Device(Support(True, "emulated"))


@pytest.fixture
def backend() -> Backend:
    cpu = resolve("cpu").backend
    if not cpu.supports("nhwc"):
        pytest.skip(cpu.supports("nhwc").reason)
    return cpu


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and scales of BatchNorm that are not the initial ones; activations stay small."""
    random = np.random.default_rng(seed)
    bounds = {"running_var": (0.5, 1.5), "running_mean": (-0.2, 0.2), "weight": (0.3, 0.8)}
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            continue
        for name, (low, high) in bounds.items():
            tensor = getattr(module, name).data
            tensor.copy_(flow.tensor(random.uniform(low, high, tensor.shape), dtype=flow.float32))
    return model


def images(size: int, count: int = 2, seed: int = 1) -> flow.Tensor:
    """(count, 3, size, size)."""
    shape = (count, 3, size, size)
    return flow.tensor(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def as_channels_last(x: flow.Tensor) -> flow.Tensor:
    return flow.tensor(np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1)))


def run(model: nn.Module, x: flow.Tensor) -> list[np.ndarray]:
    with flow.no_grad():
        result = model(x)
    results = result if isinstance(result, tuple) else (result,)
    return [tensor.numpy() for tensor in results if tensor is not None]


def small_resnet() -> nn.Module:
    return randomize(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=7))


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_give_the_same_output(name: str, backend: Backend) -> None:
    model = randomize(flowvision.models.ModelCreator.create_model(name)).eval()
    if name in ("googlenet", "inception_v3"):
        model.training = True  # its auxiliary classifiers run; its children stay in eval mode
    x = images(FAMILIES[name], count=1 if FAMILIES[name] > 96 else 2)
    expected = run(model, x)
    assert layouts.to_channels_last(model, backend) is model
    for actual, wanted in zip(run(model, as_channels_last(x)), expected, strict=True):
        assert_close(actual, wanted, reduced=REDUCED)


def test_vgg_flattens_in_the_order_of_its_checkpoint(backend: Backend) -> None:
    # Not by VGG(), whose classifier has 120 million weights.
    model = VGG.__new__(VGG)
    nn.Module.__init__(model)
    model.features = make_layers([4, "M", 8])
    model.avgpool = nn.AdaptiveAvgPool2d((7, 7))
    model.classifier = nn.Linear(8 * 7 * 7, 5)
    x = images(16)
    expected = run(model, x)[0]
    layouts.to_channels_last(model, backend)
    assert_close(run(model, as_channels_last(x))[0], expected, reduced=REDUCED)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 12, 3, padding=1, groups=3),
        nn.Conv2d(6, 6, (3, 1), stride=2, dilation=2, groups=6),
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d((2, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.AdaptiveAvgPool2d((None, 2)),
        nn.Sequential(nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(36, 4)),
    ],
    ids=str,
)
def test_layers(layer: nn.Module, backend: Backend) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), copy.deepcopy(layer))
    x = images(9)
    expected = run(model, x)[0]
    layouts.to_channels_last(model, backend)
    actual = run(model, as_channels_last(x))[0]
    if actual.ndim == 4:
        actual = actual.transpose(0, 3, 1, 2)
    assert_close(actual, expected, reduced=REDUCED)


def gradients(model: nn.Module, x: flow.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {
        name: layouts.standard_array(name, parameter.grad.numpy(), model)
        for name, parameter in model.named_parameters()
    }


def test_a_training_step_is_the_same(backend: Backend) -> None:
    first, last = small_resnet(), small_resnet()
    last.load_state_dict(first.state_dict())
    layouts.to_channels_last(last, backend)
    x = images(32, count=4)
    expected = gradients(first, x)
    actual = gradients(last, as_channels_last(x))
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, reduced=REDUCED)
    state = layouts.standard_state_dict(last)
    for name, buffer in first.named_buffers():
        assert_close(state[name].numpy(), buffer.numpy(), reduced=REDUCED)


def test_graph_gives_what_eager_gives(backend: Backend) -> None:
    model = flowvision.models.shufflenet_v2_x0_5()
    layouts.to_channels_last(randomize(model).eval(), backend)
    x = as_channels_last(images(64))
    assert_close(Forward(model)(x).numpy(), run(model, x)[0], reduced=REDUCED)


def test_weights_stay_the_same_objects_with_their_gradients() -> None:
    model = small_resnet()
    others = [nn.Conv2d(1, 2, 3), nn.FusedBatchNorm2d(2), nn.AvgPool2d(2), nn.Flatten()]
    everything = nn.Sequential(model, *others)
    weight = model.conv1.weight
    weight.grad = flow.randn(*weight.shape)
    gradient = weight.grad.numpy()
    layouts.to_channels_last(everything, YES)
    assert layouts.is_channels_last(everything)
    assert tuple(weight.shape) == (64, 7, 7, 3)
    assert (model.bn1.channel_axis, others[1].channel_axis) == (3, 3)
    np.testing.assert_array_equal(weight.grad.numpy(), gradient.transpose(0, 2, 3, 1))
    assert model.conv1.weight is weight


def test_a_weight_shared_by_two_layers_is_converted_once() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, (3, 1)), nn.Conv2d(4, 4, (3, 1)))
    model[1].weight = model[0].weight
    layouts.to_channels_last(model, YES)
    assert tuple(model[0].weight.shape) == (4, 3, 1, 4)
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize(
    ("name", "culprits"),
    [
        (
            "vit_tiny_patch16_224",
            ["VisionTransformer", r"patch_embed \(.*PatchEmbed\)", "LayerNorm"],
        ),
        ("ghostnet", [r"blocks\.0\.0\.ghost1 \(.*GhostModule\)"]),
    ],
)
def test_models_without_a_channels_last_form_are_refused(name: str, culprits: list[str]) -> None:
    model = flowvision.models.ModelCreator.create_model(name)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    with pytest.raises(UserError, match="cannot be converted to channels last") as caught:
        layouts.to_channels_last(model, YES)
    for culprit in culprits:
        assert caught.match(culprit)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == shapes


class OwnBlock(BasicBlock):
    """A subclass, whose forward may be anything."""


def test_what_could_be_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, message: str) -> None:
        with pytest.raises(UserError, match=message):
            layouts.to_channels_last(model, YES)
        assert not any("ChannelsLast" in type(module).__name__ for module in model.modules())

    refuse(ResNet(OwnBlock, [1, 1, 1, 1]), r"layer1\.0 \(.*OwnBlock\)")
    refuse(ResNet(BasicBlock, [1] * 4, norm_layer=nn.InstanceNorm2d), r"bn1 \(.*InstanceNorm2d\)")
    refuse(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d()), r"1 \(.*Dropout2d\)")
    refuse(nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2, return_indices=True)), "positions")
    refuse(nn.Linear(3, 4), "no Conv2d")

    model = small_resnet()
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    refuse(model, r"'avgpool' is AdaptiveAvgPool2d.*needs AdaptiveAvgPool2d\(1\)")

    model = small_resnet()
    model.layer1.forward = lambda x: x
    refuse(model, r"layer1 .*forward has been replaced")

    refuse(flowvision.models.googlenet(transform_input=True, init_weights=False), "transform_input")

    everyone = flow.placement("cpu", [0])
    refuse(small_resnet().to_global(placement=everyone, sbp=flow.sbp.broadcast), "global already")

    monkeypatch.setenv("ONEFLOW_ENABLE_NHWC", "1")
    model = ResNet(BasicBlock, [1, 1, 1, 1])
    monkeypatch.delenv("ONEFLOW_ENABLE_NHWC")
    refuse(model, "built under ONEFLOW_ENABLE_NHWC=1")


def test_a_linear_layer_never_sees_an_image(backend: Backend) -> None:
    model = layouts.to_channels_last(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Linear(8, 2)), backend)
    with pytest.raises(UserError, match=r"Linear layer \(8 -> 2\) gets a 4-D activation"):
        model(as_channels_last(images(8)))


def test_a_device_without_channels_last_is_an_error() -> None:
    model = small_resnet()
    with pytest.raises(UserError, match="not available on this device: no such kernels"):
        layouts.to_channels_last(model, Device(Support(False, "no such kernels")))
    assert not layouts.is_channels_last(model)


def test_every_rule_names_a_class_that_exists() -> None:
    for name in RULES:
        module, _, cls = name.rpartition(".")
        assert class_name(getattr(importlib.import_module(module), cls)) == name
