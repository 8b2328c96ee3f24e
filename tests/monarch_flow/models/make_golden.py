"""Makes timm_vision.json: logits and gradients of timm's ViT and Mixer, for tests to compare with.

`.venv-peer/bin/python -m tests.monarch_flow.models.make_golden` from the root, with the peer's
Python (`make bench` sets it up: torch 2.13.0, timm 1.0.31). All is computed in float64. Of each
gradient its norm is kept and its product with a seeded tensor, which tells elements apart.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import torchvision
from tests.monarch_flow.models import seeded_vision

torchvision.install()

import timm  # noqa: E402
from timm.models.mlp_mixer import MlpMixer  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

# timm's names; its vit_small is deit_small here.
FULL_SIZE = ("vit_base_patch16_224", "vit_small_patch16_224")
KEPT_LOGITS = 40


def _build(case: dict[str, Any]) -> torch.nn.Module:
    arguments = {key: value for key, value in case.items() if key != "kind"}
    arguments["img_size"] = tuple(arguments["img_size"])
    if case["kind"] == "vit":
        norm = functools.partial(torch.nn.LayerNorm, eps=arguments.pop("norm_eps"))
        return VisionTransformer(norm_layer=norm, **arguments)
    ratios = (arguments.pop("token_ratio"), arguments.pop("channel_ratio"))
    return MlpMixer(num_blocks=arguments.pop("depth"), mlp_ratio=ratios, **arguments)


def _fill(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    state = seeded_vision.state(shapes)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    model.double()
    return shapes


def _rounded(values: np.ndarray) -> Any:
    return np.vectorize(lambda value: float(f"{value:.13g}"))(values).tolist()


def _small(case: dict[str, Any]) -> dict[str, Any]:
    model = _build(case)
    shapes = _fill(model)
    logits = model(torch.from_numpy(seeded_vision.images(case)).double())
    loss = (logits * torch.from_numpy(seeded_vision.probe("logits", tuple(logits.shape)))).sum()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        product = (gradient * seeded_vision.probe(name, gradient.shape)).sum()
        gradients[name] = _rounded(np.array([np.linalg.norm(gradient), product]))
    return {"shapes": shapes, "logits": _rounded(logits.detach().numpy()), "gradients": gradients}


def _full(name: str) -> dict[str, Any]:
    model = timm.create_model(name, pretrained=False).eval()
    shapes = _fill(model)
    case = {"in_chans": 3, "img_size": [224, 224]}
    with torch.no_grad():
        logits = model(torch.from_numpy(seeded_vision.images(case, 1)).double())
    return {
        "shapes": shapes,
        "logits": _rounded(logits[0, :KEPT_LOGITS].numpy()),
        "std": float(logits.std(correction=0)),
    }


def main() -> None:
    golden = {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "small": {name: _small(case) for name, case in seeded_vision.CASES.items()},
        "full": {name: _full(name) for name in FULL_SIZE},
    }
    target = Path(__file__).with_name("timm_vision.json")
    text = json.dumps(golden, separators=(",", ":"))
    target.write_text(text.replace("},", "},\n") + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
