"""Makes timm_training.json: what timm and PyTorch compute in training, for tests to compare with:
pixels of RandAugment's operations, the meaning of its descriptions, cosine learning rates, mixed
batches, cross-entropy and its gradient, AdamW and SGD. `make bench` sets up the peer's Python:

    PYTHONPATH=. .venv-peer/bin/python tests/golden/make_timm_training.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.peers import torchvision

torchvision.install()

import timm  # noqa: E402
from timm.data import auto_augment, mixup  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402

_PICTURE = (9, 11)
_MAGNITUDES = (0.0, 4.2, 9.0, 10.0)
_POLICIES = ("rand-m9-mstd0.5-inc1", "rand-m15-n2", "rand-m9-n3-mstd0.5-p0.7", "rand-mstd101-mmax8")
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"t_initial": 300, "lr_min": 1e-5, "warmup_t": 10, "warmup_lr_init": 1e-6},
    {
        "t_initial": 300,
        "lr_min": 1e-5,
        "warmup_t": 10,
        "warmup_lr_init": 1e-6,
        "warmup_prefix": True,
    },
    {"t_initial": 20, "lr_min": 1e-4, "cycle_mul": 2.0, "cycle_decay": 0.5, "cycle_limit": 3},
    {"t_initial": 50, "cycle_limit": 2, "cycle_decay": 0.1, "k_decay": 1.5},
)
_TIMES = (
    0,
    1,
    5,
    9,
    10,
    11,
    20,
    49,
    50,
    59,
    60,
    99,
    100,
    139,
    140,
    150,
    250,
    299,
    300,
    305,
    309,
    310,
)


def main() -> None:
    golden = {
        "timm": timm.__version__,
        "torch": torch.__version__,
        "rand_augment": operations(),
        "policies": {text: policy(text) for text in _POLICIES},
        "schedules": [schedule(config) for config in _SCHEDULES],
        "mixup": [mixed(lam, cutmix) for lam, cutmix in ((0.3, False), (0.3, True), (0.95, True))],
        "loss": losses(),
        "optimizers": optimizers(),
    }
    target = Path(__file__).with_name("timm_training.json")
    target.write_text(json.dumps(golden, separators=(",", ":")).replace("},", "},\n") + "\n")
    print(f"{target}: {target.stat().st_size} bytes")


def picture(mode: str) -> Image.Image:
    shape = _PICTURE if mode == "L" else (*_PICTURE, 3)
    pixels = np.random.default_rng(len(mode)).integers(20, 230, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def operations() -> dict[str, Any]:
    """Pixels after each operation, by mode, set, operation, magnitude, sign and interpolation."""
    cases = []
    interpolations = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    for mode, fill in (("RGB", (124, 116, 104)), ("L", 115)):
        for increasing in (False, True):
            names = auto_augment.rand_augment_choices("", increasing)
            # Those that both sets have are the same.
            for name in [n for n in names if n.endswith("Increasing") == increasing]:
                for interpolation, resample in interpolations.items():
                    moves = name.startswith(("Rotate", "Shear", "Translate"))
                    if not moves and interpolation == "bicubic":
                        continue
                    hparams = {"img_mean": fill, "interpolation": resample}
                    magnitudes = _MAGNITUDES if mode == "RGB" else (9.0,)
                    for magnitude in magnitudes:
                        operation = auto_augment.AugmentOp(name, 1.0, magnitude, hparams)
                        for sign in (1, -1):
                            # timm negates where a draw is above one half.
                            random.random = lambda sign=sign: 0.5 - sign / 4
                            pixels = np.asarray(operation(picture(mode)))
                            cases.append(
                                {
                                    "mode": mode,
                                    "inc": increasing,
                                    "name": name.removesuffix("Increasing"),
                                    "interpolation": interpolation,
                                    "magnitude": magnitude,
                                    "sign": sign,
                                    "pixels": pixels.tobytes().hex(),
                                }
                            )
    pictures = {mode: np.asarray(picture(mode)).tobytes().hex() for mode in ("RGB", "L")}
    return {"shape": _PICTURE, "pictures": pictures, "cases": cases}


def policy(text: str) -> dict[str, Any]:
    transform = auto_augment.rand_augment_transform(text)
    first = transform.ops[0]
    return {
        "n": transform.num_layers,
        "p": first.prob,
        "m": first.magnitude,
        "mstd": min(first.magnitude_std, 1e9),
        "mmax": first.magnitude_max,
        "names": [operation.name for operation in transform.ops],
    }


def schedule(config: dict[str, Any]) -> dict[str, Any]:
    """Learning rates of timm's scheduler for a base of 1e-3."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = CosineLRScheduler(optimizer, **config)
    return {
        "config": config,
        "base_lr": 1e-3,
        "lr": {t: scheduler._get_lr(t)[0] for t in _TIMES},
        "length": scheduler.get_cycle_length(),
    }


def mixed(lam: float, cutmix: bool) -> dict[str, Any]:
    """A batch of five images mixed by timm with a given lambda, and the box that it drew."""
    boxes: list[Any] = []
    real = mixup.cutmix_bbox_and_lam

    def recorded(*args: Any, **kwargs: Any) -> Any:
        box, share = real(*args, **kwargs)
        boxes.append([int(edge) for edge in box])
        return box, share

    mixup.cutmix_bbox_and_lam = recorded
    np.random.seed(3)
    images = np.random.default_rng(0).standard_normal((6, 2, 7, 9)).astype(np.float32)
    labels = [0, 3, 1, 1, 2, 3]
    mixer = mixup.Mixup(1.0, 1.0, num_classes=4, label_smoothing=0.1)
    mixer._params_per_batch = lambda: (lam, cutmix)
    out, targets = mixer(torch.from_numpy(images.copy()), torch.tensor(labels))
    mixup.cutmix_bbox_and_lam = real
    return {
        "lam": lam,
        "cutmix": cutmix,
        "box": boxes[0] if boxes else None,
        "shape": images.shape,
        "labels": labels,
        "num_classes": 4,
        "label_smoothing": 0.1,
        "images": numbers(images),
        "mixed": numbers(out.numpy()),
        "targets": targets.tolist(),
    }


def losses() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((5, 7)) * 20
    soft = rng.dirichlet(np.ones(7), 5)
    hard = rng.integers(7, size=5)
    cases = []
    for smoothing in (0.0, 0.1):
        for name, target in (("hard", torch.tensor(hard)), ("soft", torch.tensor(soft))):
            variable = torch.tensor(scores, requires_grad=True)
            loss = torch.nn.functional.cross_entropy(variable, target, label_smoothing=smoothing)
            loss.backward()
            cases.append(
                {
                    "targets": name,
                    "smoothing": smoothing,
                    "loss": loss.item(),
                    "grad": variable.grad.tolist(),
                }
            )
    return {"scores": scores.tolist(), "soft": soft.tolist(), "hard": hard.tolist(), "cases": cases}


def optimizers() -> list[dict[str, Any]]:
    """Parameters after five steps; the weight is decayed, the bias is not."""
    rng = np.random.default_rng(2)
    start = {"weight": rng.standard_normal((3, 2)), "bias": rng.standard_normal(3)}
    grads = [{name: rng.standard_normal(v.shape) for name, v in start.items()} for _ in range(5)]
    results = []
    for config in (
        {"name": "adamw", "lr": 0.1, "weight_decay": 0.5, "betas": [0.8, 0.99], "eps": 1e-3},
        {"name": "sgd", "lr": 0.1, "weight_decay": 0.5, "momentum": 0.9},
    ):
        options = {
            key: value for key, value in config.items() if key not in ("name", "weight_decay")
        }
        parameters = {name: torch.nn.Parameter(torch.tensor(v)) for name, v in start.items()}
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[str(config["name"])]
        groups = [
            {"params": [parameters["weight"]], "weight_decay": config["weight_decay"]},
            {"params": [parameters["bias"]], "weight_decay": 0.0},
        ]
        optimizer = kind(groups, **options)
        for step in grads:
            for name, value in step.items():
                parameters[name].grad = torch.tensor(value)
            optimizer.step()
        results.append(
            {
                "config": config,
                "start": {name: v.tolist() for name, v in start.items()},
                "grads": [{name: v.tolist() for name, v in step.items()} for step in grads],
                "end": {name: v.tolist() for name, v in parameters.items()},
            }
        )
    return results


def numbers(array: np.ndarray) -> list[float]:
    return [float(f"{value:.9g}") for value in array.ravel().tolist()]


if __name__ == "__main__":
    main()
