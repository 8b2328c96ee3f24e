"""ViTAE, dense and with Monarch MLPs; each maker returns one step."""

from __future__ import annotations

import oneflow as flow
from oneflow import nn

from benchmarks.ours.models import classifier_train, prepared_forward
from benchmarks.serve import Maker, Step


def _vitae(model: str, monarch: bool, drop_path: float) -> nn.Module:
    from monarch_flow.models import create_model

    return create_model(model, mlp_cfg="monarch" if monarch else None, drop_path_rate=drop_path)


def vitae_inference(model: str, batch: int, size: int, dtype: str, monarch: bool) -> Step:
    return prepared_forward(_vitae(model, monarch, 0.0), flow.randn(batch, 3, size, size), dtype)


def vitae_train(model: str, batch: int, size: int, monarch: bool) -> Step:
    """With stochastic depth, as the published recipe has it."""
    return classifier_train(_vitae(model, monarch, 0.1).train(), batch, size)


MAKERS: dict[str, Maker] = {
    function.__name__: function for function in (vitae_inference, vitae_train)
}
