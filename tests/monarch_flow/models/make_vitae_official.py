"""Makes vitae_official.json: names, logits and gradients of narrow ViTAEs by the authors' own code.

Run it with the peer's Python (`make bench` sets it up in .venv-peer) from the repository's root:

    git clone https://github.com/ViTAE-Transformer/ViTAE-Transformer DIR
    PYTHONPATH=. .venv-peer/bin/python tests/monarch_flow/models/make_vitae_official.py DIR

At commit aebf1d7. The weights are spec_fixture.py's; the models in eval mode, in float32, which
the performers insist on; the loss is the sum of `seeded_vision.probe` times the logits. Of each
gradient: see `digest`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import torchvision

# The authors' code imports timm, which imports torchvision.
torchvision.install()

import torch  # noqa: E402

from tests.monarch_flow.models import seeded_vision, spec_fixture  # noqa: E402
from tests.monarch_flow.models.make_vitae_golden import digest  # noqa: E402

TARGET = Path(__file__).with_name("vitae_official.json")
SIDE, CLASSES = 32, 6
# As the authors set Tiny and Base, but for the sizes.
_COMMON: dict[str, Any] = {"stages": 3, "NC_depth": [0, 0, 2], "NC_heads": [1, 1, 3]}
_COMMON |= {"NC_group": [1, 1, 4], "num_classes": CLASSES, "img_size": SIDE}
CASES: dict[str, dict[str, Any]] = {
    "performers": {
        **_COMMON,
        "RC_tokens_type": ["performer", "performer", "performer_less"],
        "NC_tokens_type": ["transformer"] * 3,
        "embed_dims": [8, 8, 12],
        "token_dims": [8, 16, 24],
        "downsample_ratios": [4, 2, 2],
        "RC_heads": [1, 1, 1],
        "mlp_ratio": 2.0,
    },
    "patches": {
        **_COMMON,
        "RC_tokens_type": ["embedding", "none", "none"],
        "NC_tokens_type": ["transformer_shallow"] * 3,
        "embed_dims": [24] * 3,
        "token_dims": [24] * 3,
        "downsample_ratios": [8, 1, 1],
        "RC_heads": [1, 1, 1],
        "mlp_ratio": 4.0,
        "class_token": True,
    },
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(sys.argv[1]) / "Image-Classification"))
    from vitae.vitmodules import ViTAE_ViT_basic

    results = {}
    for name, arguments in CASES.items():
        model = ViTAE_ViT_basic(**arguments)
        shapes = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
        state = {key: torch.from_numpy(array) for key, array in spec_fixture.state(shapes).items()}
        model.load_state_dict(state)
        model.eval()
        logits = model(torch.from_numpy(spec_fixture.images(SIDE)))
        probe = torch.from_numpy(seeded_vision.probe("logits", tuple(logits.shape)))
        (logits * probe).sum().backward()
        results[name] = {
            "shapes": [[key, list(shape)] for key, shape in shapes],
            "logits": logits.tolist(),
            "gradients": {
                key: digest(parameter.grad)
                for key, parameter in model.named_parameters()
                if parameter.requires_grad
            },
        }
    text = json.dumps(results, separators=(",", ":")).replace("],", "],\n")
    TARGET.write_text(text + "\n")
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
