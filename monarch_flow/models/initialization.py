"""How the models' weights start.

Each rule is for dense layers. A structured layer decides what to make of it in `reset_dense_init`;
a Monarch layer keeps its own start.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import oneflow as flow
from oneflow import nn

from monarch_flow.layers import StructuredLinear

TRUNCATED_STD = 0.02
# Mixer's biases inside MLPs.
BIAS_STD = 1e-6

Rule = Callable[[flow.Tensor], object]


def small_normal_(tensor: flow.Tensor) -> None:
    """Fill with N(0, 0.02^2), cut off at -2 and 2."""
    nn.init.trunc_normal_(tensor, std=TRUNCATED_STD)


def init_transformer(model: nn.Module) -> None:
    """Linear layers, the head among them: `small_normal_`, biases 0. Layer norms: 1 and 0.
    Convolutions keep what their constructor drew."""
    for module in model.modules():
        if type(module) is nn.Linear:
            _fill(module, small_normal_, nn.init.zeros_)
        elif isinstance(module, StructuredLinear):
            module.reset_dense_init(small_normal_)


def init_mixer(model: nn.Module) -> None:
    """Linear layers: Xavier's uniform rule, biases N(0, 1e-6^2) inside the MLPs and 0 elsewhere.
    The head: 0. Convolutions: N(0, 1 / fan-in), biases 0. Layer norms: 1 and 0."""
    for name, module in model.named_modules():
        bias: Rule = _tiny_normal_ if "mlp" in name else nn.init.zeros_
        if name == "head":
            _fill(module, nn.init.zeros_, nn.init.zeros_)
        elif type(module) is nn.Linear:
            _fill(module, nn.init.xavier_uniform_, bias)
        elif isinstance(module, StructuredLinear):
            module.reset_dense_init(nn.init.xavier_uniform_, bias)
        elif isinstance(module, nn.Conv2d):
            _fill(module, _lecun_normal_, nn.init.zeros_)


def _fill(module: nn.Module, weight: Rule, bias: Rule) -> None:
    with flow.no_grad():
        weight(module.weight)
        if module.bias is not None:
            bias(module.bias)


def _tiny_normal_(tensor: flow.Tensor) -> None:
    nn.init.normal_(tensor, 0.0, BIAS_STD)


def _lecun_normal_(tensor: flow.Tensor) -> None:
    """N(0, 1 / fan-in) (LeCun et al. 1998, section 4.6)."""
    nn.init.normal_(tensor, 0.0, 1.0 / math.sqrt(math.prod(tensor.shape[1:])))
