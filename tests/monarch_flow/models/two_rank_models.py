"""Each model as local tensors and as global ones whose batch is split over two ranks; run by
test_global_models.py. Rank 0 prints one line of JSON."""

from __future__ import annotations

import json

import oneflow_accel

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow.models import create_model

_IMAGES = {"img_size": 28, "in_chans": 1, "num_classes": 10}
_SMALL = {"embed_dim": 32, "depth": 2, **_IMAGES}
MODELS = {
    "vit_tiny_patch4_28": {**_SMALL, "num_heads": 4, "mlp_cfg": "monarch"},
    "mixer_s16_224": {**_SMALL, "patch_size": 4},
    "t2t_vit_7": {**_SMALL, "num_heads": 4},
    "t2t_vit_t_14": {**_SMALL, "num_heads": 4, "attnlinear_cfg": "monarch"},
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


def main() -> None:
    backend = oneflow_accel.select_device()
    backend.manual_seed(1)
    results = {name: _compare(name, backend) for name in MODELS}
    if flow.env.get_rank() == 0:
        print(f"\nresults {json.dumps(results)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
