"""Monarch layers and ViTs beside dense ones; each maker returns one step."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from benchmarks.ours.models import classifier_forward, classifier_train
from benchmarks.serve import Maker, Step

# The paper's replacement of both layers of an MLP, as monarch_flow's configs name it.
_LAYER = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
_MLP = {"_target_": "monarch_flow.layers.MlpCustom", "linear1_cfg": _LAYER, "linear2_cfg": _LAYER}


def _layer(inner: int, outer: int, monarch: bool) -> nn.Module:
    if not monarch:
        return nn.Linear(inner, outer)
    from monarch_flow.layers import MonarchLinear

    return MonarchLinear(inner, outer, nblocks=4)


def layer_forward(rows: int, inner: int, outer: int, monarch: bool) -> Step:
    layer, x = _layer(inner, outer, monarch), flow.randn(rows, inner)

    def step() -> None:
        with flow.no_grad():
            layer(x)

    return step


def layer_train(rows: int, inner: int, outer: int, monarch: bool) -> Step:
    """Forward and backward, with the gradient of the input."""
    layer, x = _layer(inner, outer, monarch), flow.randn(rows, inner, requires_grad=True)
    dy = flow.randn(rows, outer)
    leaves = [x, *layer.parameters()]

    def step() -> None:
        layer(x).backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def _vit(monarch: bool) -> nn.Module:
    from monarch_flow.models import create_model

    return create_model("vit_small_patch16_224", mlp_cfg=_MLP if monarch else None)


def monarch_vit_forward(batch: int, monarch: bool) -> Step:
    return classifier_forward(_vit(monarch), batch)


def monarch_vit_train(batch: int, monarch: bool) -> Step:
    return classifier_train(_vit(monarch).train(), batch)


MAKERS: dict[str, Maker] = {
    function.__name__: function
    for function in (layer_forward, layer_train, monarch_vit_forward, monarch_vit_train)
}
