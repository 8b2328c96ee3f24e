"""Makes the small checkpoint files in tests/data/torch_checkpoints/ with torch's own torch.save.

Run it where make_torchvision_resnet.py describes: python tests/golden/make_torch_checkpoints.py
expected.npz holds the arrays that each file contains, under "<file stem>/<parameter name>".
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "data" / "torch_checkpoints"


class RunsCode:
    """Unpickling this with the stock unpickler would make a file: the tests look for it."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, ("touch code-from-the-checkpoint-ran",)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 5))


def main() -> None:
    torch.manual_seed(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    expected: dict[str, np.ndarray] = {}

    def save(stem: str, content: object, tensors: dict[str, torch.Tensor], **options: bool) -> None:
        torch.save(content, FOLDER / f"{stem}.pth", **options)
        for name, tensor in tensors.items():
            array = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
            expected[f"{stem}/{name}"] = array.numpy().copy()

    model = small_model()
    state = model.state_dict()  # an OrderedDict with the attribute _metadata
    save("zip", state, state)
    save("legacy", state, state, _use_new_zipfile_serialization=False)

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    views = {
        "whole": base,
        "transposed": base.t(),
        "column": base[:, 2],
        "corner": base[2:, 3:],
        "every_second": base.flatten()[1::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }
    save("views", views, views)
    save("views_legacy", views, views, _use_new_zipfile_serialization=False)

    names = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    kinds = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}
    kinds["bfloat16"] = torch.tensor([1.0, -3.140625, 1e30]).bfloat16()
    save("dtypes", kinds, kinds)
    save("dtypes_legacy", kinds, kinds, _use_new_zipfile_serialization=False)

    parameters = {"weight": nn.Parameter(torch.randn(3, 2)), "bias": nn.Parameter(torch.randn(3))}
    save("parameters", OrderedDict(parameters), parameters)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[2](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    parallel = {f"module.{name}": value for name, value in state.items()}
    training = {
        "epoch": 3,
        "arch": "resnet18",
        "best_acc1": torch.tensor(12.5),
        "state_dict": OrderedDict(parallel),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"step_size": 30, "gamma": 0.1, "_last_lr": [0.1]},
    }
    save("training", training, state)
    save("model_key", {"model": state, "epoch": 1}, state)

    save("runs_code", {"weight": torch.ones(2), "extra": RunsCode()}, {})
    save("runs_code_legacy", RunsCode(), {}, _use_new_zipfile_serialization=False)
    save("whole_module", nn.Linear(2, 2), {})
    save("not_a_state", [torch.ones(2)], {})

    np.savez_compressed(FOLDER / "expected.npz", **expected)
    for file in sorted(FOLDER.iterdir()):
        print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
