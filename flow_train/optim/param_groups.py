"""Which parameters weight decay applies to.

Decayed are the matrices: weights of dense and structured linears, of convolutions, of the head.
Not decayed are what weight decay would only pull from its purpose: biases, scale and shift of
normalization layers, embeddings, the class and position tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oneflow import nn

# Tokens and position embeddings of vision transformers, by the last part of their name.
TOKEN_NAMES = frozenset({"pos_embed", "cls_token", "dist_token"})
# A module may name parameters of its own that must not be decayed in an attribute of this name.
NO_DECAY_ATTRIBUTE = "no_weight_decay"

_NORMALIZATION = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a weight decay; `names` are sorted, so that a resumed run has them in
    the same order, and `parameters` go with them."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    decayed: bool

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


def group_parameters(
    model: nn.Module, *, bias_weight_decay: bool = False, normalization_weight_decay: bool = False
) -> list[ParameterGroup]:
    """Divide the trainable parameters into those with and those without weight decay; the decayed
    group is first, and an empty one is left out.

    A submodule's `no_weight_decay` (names of its own parameters, or a function that returns such
    names, which may be dotted) adds to the second group. With `normalization_weight_decay` the
    biases of normalization layers are decayed only if `bias_weight_decay` is set as well. A
    parameter that several modules share is in the group where its first name belongs. ValueError if
    no parameter requires a gradient.
    """
    without = _not_decayed(model, bias_weight_decay, normalization_weight_decay)
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not named:
        raise ValueError("the model has no parameter to train: none requires a gradient")
    groups = []
    for decayed in (True, False):
        names = tuple(sorted(name for name in named if (name not in without) == decayed))
        if names:
            groups.append(ParameterGroup(names, tuple(named[name] for name in names), decayed))
    return groups


def _not_decayed(
    model: nn.Module, bias_weight_decay: bool, normalization_weight_decay: bool
) -> set[str]:
    without = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        without |= {prefix + name for name in _flagged(module)}
        for name, _ in module.named_parameters(recurse=False):
            if (
                name in TOKEN_NAMES
                or isinstance(module, nn.Embedding)
                or (name.endswith("bias") and not bias_weight_decay)
                or (isinstance(module, _NORMALIZATION) and not normalization_weight_decay)
            ):
                without.add(prefix + name)
    return without


def _flagged(module: nn.Module) -> Iterable[str]:
    flagged = getattr(module, NO_DECAY_ATTRIBUTE, ())
    return flagged() if callable(flagged) else flagged
