"""load_on_two_processes.py OUTPUT MODEL: loads and exports MODEL under several layouts.

Each rank writes what it sees to OUTPUT/<layout>-<rank>.npz (test_weights_into_models.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from libai_projects import weights
from libai_projects.weights.gpt2 import GPT2
from tests.libai_projects.weights.parameters_only import CONFIG, ParametersOnly

OUTPUT, MODEL = Path(sys.argv[1]), sys.argv[2]
SPLIT_COLUMNS = ("query_key_value.weight", "dense_h_to_4h.weight")


def layout_of(layout: str, name: str, shape: flow.Size) -> tuple[list[int], flow.sbp.sbp]:
    stage = [1] if ".layers.1." in name or "layernorm_f" in name else [0]
    if layout == "pipeline":
        return stage, flow.sbp.broadcast
    if layout == "second_only":
        return [1], flow.sbp.broadcast
    if layout == "zero":
        return [0, 1], flow.sbp.split(0)
    if layout == "tensor" and name.endswith(SPLIT_COLUMNS):
        return [0, 1], flow.sbp.split(1)
    if layout == "tensor" and len(shape) == 2 and "position" not in name:
        return [0, 1], flow.sbp.split(0)
    return [0, 1], flow.sbp.broadcast


def make_global(model: ParametersOnly, layout: str) -> None:
    device = flow.tensor([0.0]).device.type
    for name, parameter in list(model.named_parameters()):
        *path, last = name.split(".")
        module = model
        for part in path:
            module = module._modules[part]
        ranks, sbp = layout_of(layout, name, parameter.shape)
        value = parameter.detach().to_global(flow.placement(device, ranks), flow.sbp.broadcast)
        module._parameters[last] = flow.nn.Parameter(value.to_global(sbp=sbp))


def value_everywhere(tensor: flow.Tensor) -> np.ndarray:
    both = flow.placement(tensor.placement.type, [0, 1])
    return tensor.detach().to_global(both, flow.sbp.broadcast).to_local().numpy()


def message(action: object, *args: object, **options: object) -> str:
    try:
        action(*args, **options)
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    rank = distributed.rank()
    state, config = weights.load(MODEL, "huggingface")
    assert bool(state) == (rank == 0)
    assert config["hidden_size"] == 16
    for layout in ("data", "tensor", "pipeline", "second_only", "zero"):
        model = ParametersOnly({**CONFIG, "vocab_size": 64})
        make_global(model, layout)
        weights.load_into(model, state)
        arrays = {name: value_everywhere(tensor) for name, tensor in model.named_parameters()}
        np.savez(OUTPUT / f"{layout}-{rank}.npz", **arrays)
        cfg = {**CONFIG, "vocab_size": 64}
        weights.save_huggingface(model, cfg, OUTPUT / layout)
    errors = {"load": message(weights.load, OUTPUT / "absent", "huggingface")}
    state.pop(GPT2.tokens, None)
    errors["load_into"] = message(weights.load_into, model, state)
    errors["save"] = message(weights.save_huggingface, model, cfg, OUTPUT / "zero")
    (OUTPUT / f"errors-{rank}.json").write_text(json.dumps(errors))
    distributed.barrier()


if __name__ == "__main__":
    main()
