"""Makes vitae_golden.json: logits, losses and gradients of ViTAE in PyTorch, in float64.

Run it with the peer's Python (`make bench` sets it up in .venv-peer) from the repository's root:

    PYTHONPATH=. .venv-peer/bin/python tests/monarch_flow/models/make_vitae_golden.py

The model is benchmarks/peers/vitae.py with spec_fixture.py's weights, first held against the
shared vitae_fixture.json, where it is, at 224 pixels.

"eval" is with the running statistics of BatchNorm; "train" is with those of the batch, with all
dropout left out. The loss is the mean cross-entropy. Of each gradient, and in "train" of each
running statistic afterwards: see `digest`. Convolutions before a BatchNorm have a bias whose
gradient in "train" is 0 but for rounding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.vitae import VARIANTS, Variant, ViTAE
from tests.monarch_flow.models import spec_fixture

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parents[3] / "shared" / "docs" / "oracles" / "vitae_fixture.json"
# The fixture is float32 and has six decimals.
FIXTURE_TOLERANCE = 5e-6
SIZE = 64
LABELS = [3, 10]
# The form with a class token (Base and larger) in toy sizes.
TOY = Variant((48,) * 3, (48,) * 3, depth=2, heads=4, mlp_ratio=4, groups=12, patch=16)
CASES: dict[str, dict[str, Any]] = {
    "Tiny": {"size": VARIANTS["ViTAE_basic_Tiny"]},
    "Tiny-Monarch": {"size": VARIANTS["ViTAE_basic_Tiny"], "monarch": True},
    "class token": {"size": TOY, "classes": 11, "image": SIZE},
}


def filled(**arguments: Any) -> ViTAE:
    model = ViTAE(**arguments)
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    state = spec_fixture.state(shapes)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return model.double().eval()


def check_against_fixture() -> None:
    """Exit where the model is not the one that the fixture was made with."""
    for name, expected in json.loads(FIXTURE.read_text())["vitae"].items():
        variant, _, monarch = name.partition("-")
        model = filled(size=VARIANTS[f"ViTAE_basic_{variant}"], monarch=bool(monarch))
        seen: dict[str, Tensor] = {}
        watched = {f"stage{stage}_RC": model.layers[stage].RC for stage in range(3)}
        watched["NC0"] = model.layers[2].NC[0]
        for key, module in watched.items():
            module.register_forward_hook(_keeper(seen, key))
        with torch.no_grad():
            logits = model(torch.from_numpy(spec_fixture.images()).double())
        worst = max(
            float(np.abs(logits[sample, :8].numpy() - expected[f"logits{sample}"]).max())
            for sample in (0, 1)
        )
        for key, (mean, std) in expected["stages"].items():
            out = seen[key]
            worst = max(worst, abs(out.mean().item() - mean), abs(out.std().item() - std))
        same = logits.argmax(dim=1).tolist() == expected["argmax"]
        print(f"{name}: largest difference to {FIXTURE.name} {worst:.1e}")
        if not same or worst > FIXTURE_TOLERANCE:
            sys.exit(f"{name} is not the fixture's model: argmax equal: {same}")


def _keeper(seen: dict[str, Tensor], key: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def keep(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen[key] = out

    return keep


def digest(values: Tensor) -> list[float]:
    """Sum, sum of absolute values, and the first, middle and last entry."""
    flat = values.detach().double().reshape(-1)
    some = [flat[index] for index in (0, len(flat) // 2, len(flat) - 1)]
    return [float(f"{value.item():.12g}") for value in (flat.sum(), flat.abs().sum(), *some)]


def computed(model: ViTAE) -> dict[str, Any]:
    """A forward and a backward pass in the mode that the model is in."""
    scores = model(torch.from_numpy(spec_fixture.images(SIZE)).double())
    labels = torch.tensor(LABELS)
    loss = nn.functional.cross_entropy(scores, labels)
    model.zero_grad()
    loss.backward()
    found = {
        "logits": [[float(f"{v:.12g}") for v in row] for row in scores[:, :8].tolist()],
        "std": scores.std().item(),
        "loss": loss.item(),
        "gradients": {
            name: digest(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
    }
    if model.training:
        buffers = model.named_buffers()
        found["running"] = {name: digest(value) for name, value in buffers if "running" in name}
    return found


def case(arguments: dict[str, Any]) -> dict[str, Any]:
    model = filled(**arguments)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    found = {"shapes": shapes, "eval": computed(model)}
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return {**found, "train": computed(model)}


def main() -> None:
    if FIXTURE.exists():
        check_against_fixture()
    else:
        print(f"{FIXTURE} is not there: the model is not checked")
    golden = {
        "torch": torch.__version__,
        "size": SIZE,
        "labels": LABELS,
        "cases": {name: case(arguments) for name, arguments in CASES.items()},
    }
    target = HERE / "vitae_golden.json"
    text = json.dumps(golden, separators=(",", ":"))
    target.write_text(text.replace("],", "],\n") + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
