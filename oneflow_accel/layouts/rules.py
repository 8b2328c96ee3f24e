"""Which module classes have a channels-last form, and what has to change in each.

An allow-list by exact class: a class that is not in `RULES`, a subclass of one that is included, is
refused, because its forward may spell an axis out. The forwards of flowvision's classes were read
for its release 0.2.1; the tests run each family in both layouts.

In a converted model every 4-D activation is channels last, (N, H, W, C), without exception, so the
functions that take the place of a method need no flag. `self` is a module, or nn.Graph's proxy of
one: no `super()` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.patching.runtime import device_supports

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional

CHANNELS = 3
SPATIAL = (1, 2)


def as_channels_first(x: flow.Tensor) -> flow.Tensor:
    """(N, H, W, C) -> (N, C, H, W)."""
    return x.permute(0, 3, 1, 2)


def as_channels_last(x: flow.Tensor) -> flow.Tensor:
    """(N, C, H, W) -> (N, H, W, C)."""
    return x.permute(0, 2, 3, 1)


def global_average(x: flow.Tensor) -> flow.Tensor:
    """(N, H, W, C) -> (N, 1, 1, C)."""
    return x.mean(dim=SPATIAL, keepdim=True)


def adaptive_avg_pool2d(self: Any, x: flow.Tensor) -> flow.Tensor:
    # The operator adaptive_avg_pool2d of oneflow 0.9.0 knows channels first only.
    if self.output_size == (1, 1):
        return global_average(x)
    return as_channels_last(nn.AdaptiveAvgPool2d.forward(self, as_channels_first(x)))


def avg_pool2d(self: Any, x: flow.Tensor) -> flow.Tensor:
    # OneFlow's own kernels of avg_pool_2d ignore its data_format, so the layout has to change.
    return as_channels_last(nn.AvgPool2d.forward(self, as_channels_first(x)))


def max_pool2d(self: Any, x: flow.Tensor) -> flow.Tensor:
    if device_supports(x, "nhwc_max_pool"):
        return nn.MaxPool2d.forward(self, x)
    geometry = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
    geometry |= {"ceil_mode": self.ceil_mode, "return_indices": False}
    x = as_channels_first(x)
    return as_channels_last(flow._C.max_pool2d(x, kernel_size=self.kernel_size, **geometry)[0])


def flatten(self: Any, x: flow.Tensor) -> flow.Tensor:
    return nn.Flatten.forward(self, as_channels_first(x) if x.ndim == 4 else x)


def linear(self: Any, x: flow.Tensor) -> flow.Tensor:
    if x.ndim == 4:
        raise UserError(
            f"cannot run in channels last: a Linear layer ({self.in_features} -> "
            f"{self.out_features}) gets a 4-D activation, whose last axis it would mix up"
        )
    return nn.Linear.forward(self, x)


def squeeze_excitation(self: Any, x: flow.Tensor) -> flow.Tensor:
    return x * self.gate(self.fc2(self.act(self.fc1(global_average(x)))))


def features_pool_classifier(self: Any, x: flow.Tensor) -> flow.Tensor:
    # AlexNet and VGG flatten more than one position: in the order that the checkpoint is in.
    x = self.avgpool(self.features(x))
    return self.classifier(as_channels_first(x).flatten(1))


def layers_mean_classifier(self: Any, x: flow.Tensor) -> flow.Tensor:
    return self.classifier(self.layers(x).mean(dim=SPATIAL))


def senet_logits(self: Any, x: flow.Tensor) -> flow.Tensor:
    x = self.avg_pool(x)
    if self.dropout is not None:
        x = self.dropout(x)
    return self.last_linear(as_channels_first(x).flatten(1))


def dense_layer_bottleneck(self: Any, inputs: list[flow.Tensor]) -> flow.Tensor:
    return self.conv1(self.relu1(self.norm1(flow.cat(inputs, dim=CHANNELS))))


def dense_block(self: Any, x: flow.Tensor) -> flow.Tensor:
    features = [x]
    for _, layer in self.items():
        features.append(layer(features))
    return flow.cat(features, dim=CHANNELS)


def densenet(self: Any, x: flow.Tensor) -> flow.Tensor:
    x = functional.relu(self.features(x))
    return self.classifier(x.mean(dim=SPATIAL))


def squeezenet_fire(self: Any, x: flow.Tensor) -> flow.Tensor:
    x = self.squeeze_activation(self.squeeze(x))
    wide = self.expand3x3_activation(self.expand3x3(x))
    return flow.cat([self.expand1x1_activation(self.expand1x1(x)), wide], dim=CHANNELS)


def shufflenet_block(self: Any, x: flow.Tensor) -> flow.Tensor:
    if self.stride == 1:
        left, right = flow.chunk(x, 2, dim=CHANNELS)
    else:
        left, right = self.branch1(x), x
    x = flow.cat([left, self.branch2(right)], dim=CHANNELS)
    # Channel shuffle: (..., 2, C/2) -> (..., C/2, 2), so the two branches alternate.
    n, height, width, channels = x.shape
    pairs = x.reshape(n, height, width, 2, channels // 2).transpose(3, 4)
    return pairs.reshape(n, height, width, channels)


def shufflenet(self: Any, x: flow.Tensor) -> flow.Tensor:
    for stage in (self.conv1, self.maxpool, self.stage2, self.stage3, self.stage4, self.conv5):
        x = stage(x)
    return self.fc(x.mean(dim=SPATIAL))


def concatenated_branches(self: Any, x: flow.Tensor) -> flow.Tensor:
    return flow.cat(self._forward(x), dim=CHANNELS)


def inception_e(self: Any, x: flow.Tensor) -> flow.Tensor:
    middle = self.branch3x3_1(x)
    double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
    branches = [
        self.branch1x1(x),
        self.branch3x3_2a(middle),
        self.branch3x3_2b(middle),
        self.branch3x3dbl_3a(double),
        self.branch3x3dbl_3b(double),
        self.branch_pool(self.avg_pool(x)),
    ]
    return flow.cat(branches, dim=CHANNELS)


def googlenet_auxiliary(self: Any, x: flow.Tensor) -> flow.Tensor:
    x = functional.adaptive_avg_pool2d(as_channels_first(x), (4, 4))
    x = as_channels_first(self.conv(as_channels_last(x))).flatten(1)
    x = functional.dropout(functional.relu(self.fc1(x)), 0.7, training=self.training)
    return self.fc2(x)


@dataclass(frozen=True)
class Rule:
    """How one module class becomes channels last: attributes with their values in channels first
    and last, functions that take a method's place, and functions that say why one instance cannot
    be converted, or None."""

    attributes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    obstacles: tuple[Callable[[nn.Module], str | None], ...] = ()


def _forward(function: Callable[..., Any]) -> Rule:
    return Rule(methods={"forward": function})


def _pools_to_one_position(name: str) -> Callable[[nn.Module], str | None]:
    """The class flattens what its child `name` returns, so that must be one position: the order of
    the features would else depend on the layout."""

    def obstacle(module: nn.Module) -> str | None:
        pool = reduce(getattr, name.split("."), module)
        if class_name(type(pool)) == _ADAPTIVE_POOL and pool.output_size in (1, (1, 1)):
            return None
        return f"its {name!r} is {pool}, and the flatten after it needs AdaptiveAvgPool2d(1)"

    return obstacle


def _no_input_transform(module: nn.Module) -> str | None:
    return "transform_input=True indexes the channel axis" if module.transform_input else None


def _no_indices(module: nn.Module) -> str | None:
    return (
        "return_indices=True counts positions in channels first" if module.return_indices else None
    )


def _pooled(name: str) -> Rule:
    return Rule(obstacles=(_pools_to_one_position(name),))


_ADAPTIVE_POOL = "oneflow.nn.modules.pooling.AdaptiveAvgPool2d"
_CHANNEL_POSITION = {"channel_pos": ("channels_first", "channels_last")}
_CHANNEL_AXIS = {"channel_axis": (1, CHANNELS)}
_AS_IT_IS = Rule()
_ACTIVATIONS = "ReLU ReLU6 LeakyReLU ELU SiLU GELU Mish Tanh Sigmoid Hardswish Hardsigmoid Hardtanh"

_ONEFLOW_RULES = {
    "conv.Conv2d": Rule(attributes=_CHANNEL_POSITION),
    "batchnorm.BatchNorm2d": Rule(attributes=_CHANNEL_AXIS),
    "batchnorm_fused.FusedBatchNorm2d": Rule(attributes=_CHANNEL_AXIS),
    "pooling.MaxPool2d": Rule(
        attributes=_CHANNEL_POSITION, methods={"forward": max_pool2d}, obstacles=(_no_indices,)
    ),
    "pooling.AvgPool2d": _forward(avg_pool2d),
    "pooling.AdaptiveAvgPool2d": _forward(adaptive_avg_pool2d),
    "flatten.Flatten": _forward(flatten),
    "linear.Linear": _forward(linear),
    **dict.fromkeys(("linear.Identity", "dropout.Dropout"), _AS_IT_IS),
    **{f"container.{name}": _AS_IT_IS for name in ("Sequential", "ModuleList", "ModuleDict")},
    **{f"activation.{name}": _AS_IT_IS for name in _ACTIVATIONS.split()},
}

_CONCATENATION = _forward(concatenated_branches)
_OF_INCEPTIONS = Rule(obstacles=(_pools_to_one_position("avgpool"), _no_input_transform))

# Classes that are channels last as they are, by module.
_AS_THEY_ARE = {
    "layers.blocks.conv_bn_act": "ConvBnAct",
    "layers.regularization.stochastic_depth": "StochasticDepth",
    "models.resnet": "BasicBlock Bottleneck",
    "models.senet": "SEBottleneck SEResNetBottleneck SEResNeXtBottleneck",
    "models.regnet": "SimpleStemIN AnyStage ResBottleneckBlock BottleneckTransform",
    "models.mobilenet_v2": "InvertedResidual ConvBNActivation",
    "models.mobilenet_v3": "InvertedResidual ConvBNActivation SqueezeExcitation",
    "models.mnasnet": "_InvertedResidual",
    "models.efficientnet": "MBConv SqueezeExcitation",
    "models.densenet": "_Transition",
    **dict.fromkeys(("models.googlenet", "models.inception_v3"), "BasicConv2d"),
}

_FLOWVISION_RULES = {
    "layers.attention.se.SEModule": _forward(squeeze_excitation),
    "models.alexnet.AlexNet": _forward(features_pool_classifier),
    "models.vgg.VGG": _forward(features_pool_classifier),
    "models.resnet.ResNet": _pooled("avgpool"),
    "models.senet.SENet": Rule(methods={"logits": senet_logits}),
    "models.regnet.RegNet": _pooled("avgpool"),
    "models.mobilenet_v2.MobileNetV2": _pooled("adaptive_avg_pool2d"),
    "models.mobilenet_v3.MobileNetV3": _pooled("avgpool"),
    "models.mnasnet.MNASNet": _forward(layers_mean_classifier),
    "models.efficientnet.EfficientNet": _pooled("avgpool"),
    "models.densenet.DenseNet": _forward(densenet),
    "models.densenet._DenseBlock": _forward(dense_block),
    "models.densenet._DenseLayer": Rule(methods={"bn_function": dense_layer_bottleneck}),
    "models.squeezenet.SqueezeNet": _pooled("classifier.3"),
    "models.squeezenet.Fire": _forward(squeezenet_fire),
    "models.shufflenet_v2.ShuffleNetV2": _forward(shufflenet),
    "models.shufflenet_v2.InvertedResidual": _forward(shufflenet_block),
    "models.googlenet.GoogLeNet": _OF_INCEPTIONS,
    "models.googlenet.Inception": _CONCATENATION,
    "models.googlenet.InceptionAux": _forward(googlenet_auxiliary),
    "models.inception_v3.Inception3": _OF_INCEPTIONS,
    "models.inception_v3.InceptionE": _forward(inception_e),
    "models.inception_v3.InceptionAux": _pooled("adaptive_avp_pool"),
    **{f"models.inception_v3.Inception{letter}": _CONCATENATION for letter in "ABCD"},
    **{
        f"{module}.{name}": _AS_IT_IS
        for module, names in _AS_THEY_ARE.items()
        for name in names.split()
    },
}

RULES: dict[str, Rule] = {
    **{f"oneflow.nn.modules.{name}": rule for name, rule in _ONEFLOW_RULES.items()},
    **{f"flowvision.{name}": rule for name, rule in _FLOWVISION_RULES.items()},
}


def class_name(cls: type) -> str:
    """Qualified name of a module class, the channels-first one if it has been converted."""
    cls = channels_first_class(cls)
    return f"{cls.__module__}.{cls.__qualname__}"


def channels_first_class(cls: type) -> type:
    """The class that `channels_last_class` has made `cls` of; `cls` itself if it is unconverted."""
    return getattr(cls, "_channels_first_class", cls)


@cache
def channels_last_class(cls: type) -> type:
    """The subclass of `cls` with its rule's methods; `cls` itself if there are none, or it is one.
    A class and not a forward in the instance, because nn.Graph calls the class's forward."""
    methods = RULES[class_name(cls)].methods
    if not methods or channels_first_class(cls) is not cls:
        return cls
    members = {**methods, "_channels_first_class": cls, "__module__": __name__}
    return type(f"ChannelsLast{cls.__name__}", (cls,), members)
