"""Forward functions for channels-last activations, (N, H, W, C).

Each takes the place of a method that spells an axis out; `rules.py` says which. In a converted
model every 4-D activation is channels last, without exception, so these functions need no flag.
`self` is a module, or nn.Graph's proxy of one: no `super()` here.
"""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

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
