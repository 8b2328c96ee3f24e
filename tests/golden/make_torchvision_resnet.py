"""Makes torchvision_resnet50.json: logits of torchvision's own ResNet50, for tests to compare with.

Run it in an environment of its own, with CPython 3.11 (torch does not go with oneflow's numpy):

    python3.11 -m venv /tmp/golden && . /tmp/golden/bin/activate
    pip install torch==2.13.0 numpy==2.4.6 pillow==13.0.0
    pip install --no-deps torchvision==0.28.0
    python tests/golden/make_torchvision_resnet.py

The weights and images come from seeded_weights.py. The logits are computed in float64 and stored
rounded to float32.
"""

from __future__ import annotations

import json
from pathlib import Path

import seeded_weights
import torch

# The wheel of torchvision on PyPI is built for another build of torch, so its compiled operators
# do not load; the detection operators that importing the package looks up are declared instead.
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402

IMAGE_COUNT = 2
IMAGE_SIZE = 224


def main() -> None:
    model = torchvision.models.resnet50(weights=None)
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    state = seeded_weights.resnet_state(shapes)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    pictures = torch.from_numpy(seeded_weights.images(IMAGE_COUNT, IMAGE_SIZE))
    with torch.no_grad():
        logits = model.double().eval()(pictures.double()).float()
    golden = {
        "model": "resnet50",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "image_size": IMAGE_SIZE,
        "shapes": shapes,
        "logits": [[float(f"{value:.9g}") for value in row] for row in logits.tolist()],
    }
    target = Path(__file__).with_name("torchvision_resnet50.json")
    target.write_text(json.dumps(golden, separators=(",", ":")).replace("],[", "],\n[") + "\n")
    print(f"{target}: {target.stat().st_size} bytes, largest logit {logits.abs().max():.3f}")


if __name__ == "__main__":
    main()
