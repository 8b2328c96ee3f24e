"""Whole models: forward passes, training steps, and inference as we ship it."""

from __future__ import annotations

from functools import partial

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

BOTH = Both(flow, {"resnet50": partial(create_model, "resnet50", 1000), "gpt2": GPT2})
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


def _forward(model: nn.Module, batch: flow.Tensor, way: str = "eager") -> Step:
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


def _inference(model: nn.Module, batch: flow.Tensor, dtype: str) -> Step:
    assert dtype == BOTH.current.precision
    return _forward(model, batch, "prepared nn.Graph")


def resnet50_forward(batch: int, way: str = "eager") -> Step:
    model, shape = _resnet50(batch)
    return _forward(model, flow.randn(*shape), way)


def resnet50_inference(batch: int, dtype: str) -> Step:
    model, shape = _resnet50(batch)
    return _inference(model, flow.randn(*shape), dtype)


def resnet50_train(batch: int, graph: bool = False) -> Step:
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


def _monarch_vit(monarch: bool) -> nn.Module:
    return monarch_models.create_model("vit_small_patch16_224", mlp_cfg=_MLP if monarch else None)


def vitae(model: str, monarch: bool, drop_path: float = 0.0) -> nn.Module:
    mlp = "monarch" if monarch else None
    return monarch_models.create_model(model, mlp_cfg=mlp, drop_path_rate=drop_path)


MAKERS: dict[str, Maker] = {
    **{make.__name__: make for make in (resnet50_forward, resnet50_inference, resnet50_train)},
    "resnet50_train_graph": partial(resnet50_train, graph=True),
    "vit_forward": partial(BOTH.classifier, _forward, VisionTransformer),
    "vit_inference": partial(BOTH.classifier, _inference, VisionTransformer),
    "vit_train": partial(BOTH.classifier_train, VisionTransformer),
    "gpt2_forward": gpt2_forward,
    "gpt2_train": gpt2_train,
    "layer_forward": partial(BOTH.layer_forward, _layer),
    "layer_train": partial(BOTH.layer_train, _layer),
    "monarch_vit_forward": partial(BOTH.classifier, _forward, _monarch_vit),
    "monarch_vit_train": partial(BOTH.classifier_train, _monarch_vit),
    "vitae_inference": partial(BOTH.classifier, _inference, vitae),
    # With stochastic depth, as the published recipe has it.
    "vitae_train": partial(BOTH.classifier_train, partial(vitae, drop_path=0.1)),
    **BOTH.makers(),
}
