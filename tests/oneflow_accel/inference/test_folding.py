"""prepare(): the same outputs with batch norms folded, in both layouts, eagerly and in nn.Graph."""

from __future__ import annotations

from collections.abc import Callable

from oneflow_accel import layouts, settings
from oneflow_accel.errors import UserError
from oneflow_accel.inference import prepare
from oneflow_accel.inference.folding import InferenceConv2d

import flowvision
import numpy as np
import oneflow as flow
import pytest
from flowvision.models.googlenet import BasicConv2d as GoogLeNetConv
from flowvision.models.inception_v3 import BasicConv2d as InceptionConv
from flowvision.models.resnet import BasicBlock, Bottleneck, ResNet
from oneflow import nn

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import Forward, needs_plugin
from tests.tolerances import assert_close

Randomize = Callable[[nn.Module], nn.Module]

# Terms that the widest convolution of these models sums up: 3 x 3 x 512.
REDUCED = 4608
LAYOUTS = ["channels_first", pytest.param("channels_last", marks=needs_plugin)]


def small_resnext() -> nn.Module:
    return ResNet(
        Bottleneck,
        [1, 2, 1, 1],
        num_classes=7,
        groups=4,
        width_per_group=8,
        replace_stride_with_dilation=[False, True, True],
    )


def plain_chain() -> nn.Module:
    """Every way in which a Sequential can be folded, or cannot."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16, eps=1e-3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16, affine=False),
        nn.Sequential(nn.Conv2d(16, 12, 1), nn.ReLU(), nn.BatchNorm2d(12)),
        nn.Conv2d(12, 12, 3, dilation=2, padding=2),
        nn.BatchNorm2d(12),
        nn.Hardswish(),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 9, 1),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: flowvision.models.resnet18(num_classes=7),
    "small_resnext": small_resnext,
    "plain_chain": plain_chain,
    "googlenet_conv": lambda: nn.Sequential(GoogLeNetConv(3, 8, kernel_size=3), nn.Flatten()),
    "inception_conv": lambda: nn.Sequential(InceptionConv(3, 8, kernel_size=3), nn.Flatten()),
}


def images(layout: str, size: int = 32) -> flow.Tensor:
    array = np.random.default_rng(1).standard_normal((2, 3, size, size)).astype(np.float32)
    if layout == "channels_last":
        array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
    return flow.tensor(array)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_same_outputs(name: str, layout: str, randomize: Randomize) -> None:
    model = randomize(MODELS[name]())
    if layout == "channels_last":
        try:
            layouts.to_channels_last(model)
        except UserError:
            pytest.skip("the model has no channels-last form")
    x = images(layout)
    with flow.no_grad():
        expected = model(x).numpy()
        prepared = prepare(model)
        assert_close(prepared(x).numpy(), expected, reduced=REDUCED)
    assert any(isinstance(module, InferenceConv2d) for module in prepared.modules())
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_is_eager(layout: str, randomize: Randomize) -> None:
    model = randomize(MODELS["resnet18"]())
    if layout == "channels_last":
        layouts.to_channels_last(model)
    prepared = prepare(model)
    x = images(layout)
    with flow.no_grad():
        eager = prepared(x).numpy()
        graph = Forward(prepared)
        for _ in range(2):
            np.testing.assert_array_equal(graph(x).numpy(), eager)


@pytest.mark.parametrize("name", ["resnet18", "small_resnext"])
def test_nothing_is_left_of_the_batch_norms(name: str) -> None:
    prepared = prepare(MODELS[name]())
    left = [module for module in prepared.modules() if isinstance(module, nn.BatchNorm2d)]
    assert left == []
    relus = [module for module in prepared.modules() if isinstance(module, InferenceConv2d)]
    assert sum(not module.activation for module in relus) == sum(
        module.downsample is not None
        for module in prepared.modules()
        if isinstance(module, (BasicBlock, Bottleneck))
    )


def test_what_cannot_be_folded_stays() -> None:
    prepared = prepare(plain_chain())
    left = [module for module in prepared.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(left) == 2  # the one after the relu and the one after Hardswish


def test_a_shared_layer_stays_shared_and_right(randomize: Randomize) -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model = randomize(nn.Sequential(conv, norms[0], nn.ReLU(), conv, norms[1], conv, nn.Tanh()))
    x = flow.randn(2, 4, 5, 5)
    with flow.no_grad():
        assert_close(prepare(model)(x).numpy(), model(x).numpy(), reduced=37)


def test_a_subclass_with_a_forward_of_its_own(randomize: Randomize) -> None:
    class TwiceNormed(BasicBlock):
        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return self.bn1(self.bn1(self.conv1(x)))

    model = randomize(TwiceNormed(4, 4))
    x = flow.randn(2, 4, 6, 6)
    with flow.no_grad():
        assert_close(prepare(model)(x).numpy(), model(x).numpy(), reduced=37)


def test_the_model_is_not_changed(randomize: Randomize) -> None:
    model = randomize(small_resnext()).train()
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    prepared = prepare(model)
    with flow.no_grad():
        prepared(images("channels_first"))
        prepared.conv1.weight.zero_()
    assert model.training
    assert [type(module) for module in model.modules()] == classes
    after = model.state_dict()
    assert list(after) == list(before)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name].numpy(), array)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_copy_is_in_eval_mode_without_gradients() -> None:
    prepared = prepare(small_resnext().train())
    assert not any(module.training for module in prepared.modules())
    assert not any(parameter.requires_grad for parameter in prepared.parameters())


def test_refusals() -> None:
    model = plain_chain()
    with pytest.raises(ValueError, match="float16"):
        prepare(model, dtype=flow.float16)
    model[0].register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(UserError, match="0 has forward hooks"):
        prepare(model)
    placed = plain_chain().to_global(flow.placement("cpu", [0]), flow.sbp.broadcast)
    with pytest.raises(UserError, match=r"before \.to_global"):
        prepare(placed)


_WITHOUT_PLUGIN = """
import oneflow_accel
from oneflow_accel.inference import map_layer, prepare
from oneflow_accel.kernels.convolution import channels_last_conv2d
import numpy as np, oneflow as flow, flowvision
@map_layer
class MapConv(flow.nn.Conv2d):
    def forward(self, x):
        return channels_last_conv2d(x, self.weight, self.bias)
resnet = flowvision.models.resnet18(num_classes=7).eval()
on_maps = flow.nn.Sequential(MapConv(3, 4, 3), flow.nn.ReLU()).eval()
with flow.no_grad():
    for dtype in (None, flow.bfloat16):
        for model, x in ((resnet, flow.randn(2, 3, 32, 32)), (on_maps, flow.randn(2, 9, 8, 3))):
            np.testing.assert_allclose(
                prepare(model, dtype)(x).numpy(), model(x).numpy(), rtol=1e-3, atol=1e-4)
print("equal")
"""


def test_without_the_plugin() -> None:
    result = run_process(["-c", _WITHOUT_PLUGIN], timeout=60, env={settings.PLUGIN.name: "off"})
    assert "equal" in result.stdout, result.stdout + result.stderr
