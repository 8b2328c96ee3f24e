"""Each model as local tensors and as global ones whose batch is split over two ranks, and training
steps of one with running statistics; run by test_global_models.py. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import Any

import oneflow_accel
from oneflow_accel import distributed

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.optim import build_loss, build_optimizer
from flow_train.steps.eager import EagerStep
from flow_train.steps.graph import GraphStep
from flow_train.task import ImageTask
from monarch_flow.models import create_model

_IMAGES = {"img_size": 28, "in_chans": 1, "num_classes": 10}
_SMALL = {"embed_dim": 32, "depth": 2, **_IMAGES}
MODELS = {
    "vit_tiny_patch4_28": {**_SMALL, "num_heads": 4, "mlp_cfg": "monarch"},
    "mixer_s16_224": {**_SMALL, "patch_size": 4},
    "t2t_vit_7": {**_SMALL, "num_heads": 4},
    "t2t_vit_t_14": {**_SMALL, "num_heads": 4, "attnlinear_cfg": "monarch"}
    | {"t2tattn1_cfg": {"local_context": 7, "nb_features": 6}},
    "ViTAE_basic_Tiny": {
        "embed_dims": (8, 8, 16),
        "token_dims": (8, 16, 32),
        "depth": 2,
        "conv_groups": 8,
        "mlp_cfg": "monarch",
        **_IMAGES,
    },
    "ViTAE_basic_Base": {**_SMALL, "patch_size": 4, "num_heads": 4, "conv_groups": 8},
}


def _loss(model: nn.Module, images: flow.Tensor, labels: flow.Tensor) -> flow.Tensor:
    logits = model(images)
    nn.functional.cross_entropy(logits, labels).backward()
    return logits


def _compare(name: str, backend: oneflow_accel.Backend) -> dict[str, object]:
    model = create_model(name, **MODELS[name]).eval()
    nn.init.normal_(model.head.weight)
    images, labels = flow.randn(4, 1, 28, 28), flow.arange(4)
    expected = _loss(model, images, labels).numpy()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    gradients = {key: p.grad.numpy() for key, p in trained.items()}
    for parameter in trained.values():
        parameter.grad = None

    placement = backend.placement([0, 1])
    model.to_global(placement, flow.sbp.broadcast)
    split = [
        tensor.to_global(placement, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
        for tensor in (images, labels)
    ]
    logits = _loss(model, *split)
    found = {key: p.grad for key, p in model.named_parameters() if key in gradients}
    whole = {key: grad.to_global(sbp=flow.sbp.broadcast).to_local() for key, grad in found.items()}
    largest = max(np.abs(grad).max() for grad in gradients.values())
    return {
        "split": logits.sbp == (flow.sbp.split(0),),
        "logits": float(np.abs(logits.numpy() - expected).max() / np.abs(expected).max()),
        "gradients": float(
            max(np.abs(whole[key].numpy() - gradients[key]).max() for key in gradients) / largest
        ),
    }


def _statistics(way: str, backend: oneflow_accel.Backend) -> list[list[float]]:
    """Running means that each rank evaluates with, after two steps on images of its own."""
    backend.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    model = model.to(backend.device())

    def optimizer(model: nn.Module) -> Any:
        return build_optimizer(model, {"name": "adamw", "lr": 1e-3})

    step: EagerStep | GraphStep
    task = ImageTask(build_loss(None))
    if way == "eager":
        step = EagerStep(model, backend, optimizer(model), task)
    else:
        rate = {"learning_rate": lambda step: 1e-3, "steps": 2}
        step = GraphStep(model, backend, optimizer, task, **rate)
    step.model.train()
    for images in _images(distributed.rank()):
        step.step({"images": images, "labels": np.arange(4) % 2}, 1e-3)
    means = step.evaluated_model().state_dict()["0.running_mean"].numpy().tolist()
    return distributed.all_gather_json(means)


def _images(rank: int) -> np.ndarray:
    """(2 steps, 4, 3, 2, 2), float32; each rank's mean is elsewhere."""
    random = np.random.default_rng(rank)
    return (random.standard_normal((2, 4, 3, 2, 2)) + 3 * rank).astype(np.float32)


def expected_means() -> np.ndarray:
    """Rank 0's, by the definition: 0.9 of the old mean and 0.1 of the batch's."""
    first, second = (images.astype(np.float64).mean(axis=(0, 2, 3)) for images in _images(0))
    return 0.9 * 0.1 * first + 0.1 * second


def main() -> None:
    backend = oneflow_accel.select_device()
    backend.manual_seed(1)
    models = {name: _compare(name, backend) for name in MODELS}
    statistics = {way: _statistics(way, backend) for way in ("eager", "graph")}
    results = {"models": models, "statistics": statistics}
    if flow.env.get_rank() == 0:
        print(f"\nresults {json.dumps(results)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
