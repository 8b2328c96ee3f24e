"""Whole models: forward passes, training steps, and inference as we ship it."""

from __future__ import annotations

import oneflow_accel
from oneflow_accel import inference, layouts

import numpy as np
import oneflow as flow
from oneflow import nn

from benchmarks.both import Both
from benchmarks.ours.networks import GPT2, VisionTransformer
from benchmarks.serve import Maker, Step
from flow_train.optim import CrossEntropy
from flow_train.options import Calendar, Position, TrainerOptions
from flow_train.steps.graph import step_maker
from flow_train.task import ImageTask
from monarch_flow import models as monarch_models
from monarch_flow.layers import MonarchLinear
from resnet50_imagenet.inference import forward_graph
from resnet50_imagenet.models import create_model

BOTH = Both(flow)
# The paper's replacement of both layers of an MLP, as monarch_flow's configs name it.
_LAYER = {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
_MLP = {"_target_": "monarch_flow.layers.MlpCustom", "linear1_cfg": _LAYER, "linear2_cfg": _LAYER}


def _resnet50(batch: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Channels last where the kernels can; stock OneFlow has NCHW only."""
    backend = oneflow_accel.current_backend()
    model = create_model("resnet50", 1000)
    if backend.supports("nhwc"):
        return layouts.to_channels_last(model, backend), (batch, 224, 224, 3)
    return model, (batch, 3, 224, 224)


def _forward(model: nn.Module, batch: flow.Tensor, way: str) -> Step:
    """`way` is "eager" or names what is done to the model: "prepared" for inference, in the row's
    precision, "nn.Graph", or both."""
    forward = model.eval()
    if "prepared" in way:
        forward = inference.prepare(forward, dtype=getattr(flow, BOTH.current.precision))
    if "nn.Graph" in way:
        forward = forward_graph(forward)
    if "prepared" in way:
        return BOTH.without_gradient(lambda: forward(batch))
    return BOTH.forward(forward, batch)


def prepared_forward(model: nn.Module, batch: flow.Tensor, dtype: str) -> Step:
    assert dtype == BOTH.current.precision
    return _forward(model, batch, "prepared nn.Graph")


def resnet50_forward(batch: int, way: str = "eager") -> Step:
    model, shape = _resnet50(batch)
    return _forward(model, flow.randn(*shape), way)


def resnet50_inference(batch: int, dtype: str) -> Step:
    model, shape = _resnet50(batch)
    return prepared_forward(model, flow.randn(*shape), dtype)


def _resnet50_train(batch: int, *, graph: bool) -> Step:
    model, shape = _resnet50(batch)
    random = np.random.default_rng(0)
    images = random.standard_normal(shape, dtype=np.float32)
    labels = random.integers(1000, size=batch)
    options = TrainerOptions(max_epochs=1, graph=graph, precision=BOTH.current.precision)
    calendar = Calendar(options, 1000, lambda epoch: 0.001)

    def optimizer(model: nn.Module) -> flow.optim.Optimizer:
        return flow.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)

    backend, task = oneflow_accel.current_backend(), ImageTask(CrossEntropy())
    make = step_maker(backend, options, calendar, optimizer, task, batch_size=batch)
    step = make(model.train(), Position())
    return lambda: step.step({"images": images, "labels": labels}, 0.001)


def resnet50_train(batch: int) -> Step:
    return _resnet50_train(batch, graph=False)


def resnet50_train_graph(batch: int) -> Step:
    return _resnet50_train(batch, graph=True)


def classifier_forward(model: nn.Module, batch: int, way: str = "eager") -> Step:
    return _forward(model, flow.randn(batch, 3, 224, 224), way)


def vit_forward(batch: int, way: str = "eager") -> Step:
    return classifier_forward(VisionTransformer(), batch, way)


def vit_inference(batch: int, dtype: str) -> Step:
    return prepared_forward(VisionTransformer(), flow.randn(batch, 3, 224, 224), dtype)


def vit_train(batch: int) -> Step:
    return BOTH.classifier_train(VisionTransformer(), batch)


def gpt2_forward(batch: int, tokens: int) -> Step:
    return BOTH.forward(GPT2().eval(), flow.randint(0, 50257, (batch, tokens)))


def gpt2_train(batch: int, tokens: int) -> Step:
    model = GPT2()
    ids = flow.randint(0, 50257, (batch, tokens))
    # Each position predicts the next token, the last one nothing: labels are shifted and not the
    # logits, which are large.
    nothing = flow.full((batch, 1), -100, dtype=flow.int64)
    labels = flow.cat([ids[:, 1:], nothing], dim=1).reshape(-1)

    def loss() -> flow.Tensor:
        logits = model(ids)
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels)

    return BOTH.train(BOTH.adamw(model), loss)


def _layer(inner: int, outer: int, monarch: bool) -> nn.Module:
    if not monarch:
        return nn.Linear(inner, outer)
    return MonarchLinear(inner, outer, nblocks=4)


def layer_forward(rows: int, inner: int, outer: int, monarch: bool) -> Step:
    return BOTH.layer_forward(_layer(inner, outer, monarch), rows, inner)


def layer_train(rows: int, inner: int, outer: int, monarch: bool) -> Step:
    return BOTH.layer_train(_layer(inner, outer, monarch), rows, inner)


def _vit(monarch: bool) -> nn.Module:
    return monarch_models.create_model("vit_small_patch16_224", mlp_cfg=_MLP if monarch else None)


def monarch_vit_forward(batch: int, monarch: bool) -> Step:
    return classifier_forward(_vit(monarch), batch)


def monarch_vit_train(batch: int, monarch: bool) -> Step:
    return BOTH.classifier_train(_vit(monarch).train(), batch)


def _vitae(model: str, monarch: bool, drop_path: float) -> nn.Module:
    mlp = "monarch" if monarch else None
    return monarch_models.create_model(model, mlp_cfg=mlp, drop_path_rate=drop_path)


def vitae_inference(model: str, batch: int, size: int, dtype: str, monarch: bool) -> Step:
    return prepared_forward(_vitae(model, monarch, 0.0), flow.randn(batch, 3, size, size), dtype)


def vitae_train(model: str, batch: int, size: int, monarch: bool) -> Step:
    """With stochastic depth, as the published recipe has it."""
    return BOTH.classifier_train(_vitae(model, monarch, 0.1).train(), batch, size)


MAKERS: dict[str, Maker] = {
    function.__name__: function
    for function in (
        resnet50_forward,
        resnet50_inference,
        resnet50_train,
        resnet50_train_graph,
        vit_forward,
        vit_inference,
        vit_train,
        gpt2_forward,
        gpt2_train,
        layer_forward,
        layer_train,
        monarch_vit_forward,
        monarch_vit_train,
        vitae_inference,
        vitae_train,
    )
}
