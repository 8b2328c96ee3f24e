"""Which module classes have a channels-last form, and what has to change in each.

An allow-list by exact class: a class that is not in `RULES`, a subclass of one that is included, is
refused, because its forward may spell an axis out. The forwards of flowvision's classes were read
for its release 0.2.1; the tests run each family in both layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from oneflow_accel.layouts import forwards

from oneflow import nn


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
_CHANNEL_AXIS = {"channel_axis": (1, forwards.CHANNELS)}
_AS_IT_IS = Rule()
_ACTIVATIONS = "ReLU ReLU6 LeakyReLU ELU SiLU GELU Mish Tanh Sigmoid Hardswish Hardsigmoid Hardtanh"

_ONEFLOW_RULES = {
    "conv.Conv2d": Rule(attributes=_CHANNEL_POSITION),
    "batchnorm.BatchNorm2d": Rule(attributes=_CHANNEL_AXIS),
    "batchnorm_fused.FusedBatchNorm2d": Rule(attributes=_CHANNEL_AXIS),
    "pooling.MaxPool2d": Rule(attributes=_CHANNEL_POSITION, obstacles=(_no_indices,)),
    "pooling.AvgPool2d": _forward(forwards.avg_pool2d),
    "pooling.AdaptiveAvgPool2d": _forward(forwards.adaptive_avg_pool2d),
    "flatten.Flatten": _forward(forwards.flatten),
    "linear.Linear": _forward(forwards.linear),
    **dict.fromkeys(("linear.Identity", "dropout.Dropout"), _AS_IT_IS),
    **{f"container.{name}": _AS_IT_IS for name in ("Sequential", "ModuleList", "ModuleDict")},
    **{f"activation.{name}": _AS_IT_IS for name in _ACTIVATIONS.split()},
}

_CONCATENATION = _forward(forwards.concatenated_branches)

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
    "layers.attention.se.SEModule": _forward(forwards.squeeze_excitation),
    "models.alexnet.AlexNet": _forward(forwards.features_pool_classifier),
    "models.vgg.VGG": _forward(forwards.features_pool_classifier),
    "models.resnet.ResNet": _pooled("avgpool"),
    "models.senet.SENet": Rule(methods={"logits": forwards.senet_logits}),
    "models.regnet.RegNet": _pooled("avgpool"),
    "models.mobilenet_v2.MobileNetV2": _pooled("adaptive_avg_pool2d"),
    "models.mobilenet_v3.MobileNetV3": _pooled("avgpool"),
    "models.mnasnet.MNASNet": _forward(forwards.layers_mean_classifier),
    "models.efficientnet.EfficientNet": _pooled("avgpool"),
    "models.densenet.DenseNet": _forward(forwards.densenet),
    "models.densenet._DenseBlock": _forward(forwards.dense_block),
    "models.densenet._DenseLayer": Rule(methods={"bn_function": forwards.dense_layer_bottleneck}),
    "models.squeezenet.SqueezeNet": _pooled("classifier.3"),
    "models.squeezenet.Fire": _forward(forwards.squeezenet_fire),
    "models.shufflenet_v2.ShuffleNetV2": _forward(forwards.shufflenet),
    "models.shufflenet_v2.InvertedResidual": _forward(forwards.shufflenet_block),
    "models.googlenet.GoogLeNet": Rule(
        obstacles=(_pools_to_one_position("avgpool"), _no_input_transform)
    ),
    "models.googlenet.Inception": _CONCATENATION,
    "models.googlenet.InceptionAux": _forward(forwards.googlenet_auxiliary),
    "models.inception_v3.Inception3": Rule(
        obstacles=(_pools_to_one_position("avgpool"), _no_input_transform)
    ),
    "models.inception_v3.InceptionE": _forward(forwards.inception_e),
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


def channels_last_class(cls: type) -> type:
    """The subclass of `cls` with its rule's methods; `cls` itself if there are none. A class and
    not a forward in the instance, because nn.Graph calls the class's forward."""
    return _subclass(channels_first_class(cls))


@cache
def _subclass(cls: type) -> type:
    methods = RULES[class_name(cls)].methods
    if not methods:
        return cls
    members = {**methods, "_channels_first_class": cls, "__module__": __name__}
    return type(f"ChannelsLast{cls.__name__}", (cls,), members)
