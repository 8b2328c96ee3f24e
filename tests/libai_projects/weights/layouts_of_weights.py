"""Loads models in every layout of two processes, and exports them (test_weights_into_models.py).

    layouts_of_weights.py OUTPUT FOLDER=REFERENCE ...

REFERENCE has input_ids and logits. Rank 0 writes OUTPUT/<model>-<layout>.npy and exports to the
folder of the same name; each rank writes what errors it saw to OUTPUT/errors-<rank>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from libai_projects import weights
from libai_projects.models.gpt2.model import GPT2ForPreTraining
from libai_projects.weights.gpt2 import GPT2


def everywhere(x: flow.Tensor) -> np.ndarray:
    whole = x.to_global(sbp=[flow.sbp.broadcast] * len(x.sbp))
    both = flow.placement.all(x.placement.type)
    return whole.to_global(placement=both, sbp=flow.sbp.broadcast).numpy()


def run(output: Path, layout: str, folder: Path, reference: Path) -> None:
    state, config = weights.load(folder, "huggingface")
    assert bool(state) == distributed.is_main()
    sizes = {f"{kind}_parallel_size": 1 for kind in ("data", "tensor", "pipeline")}
    sizes |= {f"{layout}_parallel_size": 2, "pipeline_num_layers": config["num_layers"]}
    dist.setup_dist_util(OmegaConf.create(sizes))
    # Padded, as a trainer does for tensor parallelism.
    config["vocab_size"] = -(-config["vocab_size"] // 128) * 128
    model = GPT2ForPreTraining(config).eval()
    weights.load_into(model, state)
    with np.load(reference) as arrays, flow.no_grad():
        ids = flow.tensor(
            arrays["input_ids"], placement=dist.get_layer_placement(0), sbp=dist.get_hidden_sbp()
        )
        actual = everywhere(model(ids)["prediction_scores"])
    name = output / f"{folder.name}-{layout}"
    if distributed.is_main():
        np.save(f"{name}.npy", actual)
    weights.save_huggingface(model, config, name)
    if layout == "pipeline":
        state.pop(GPT2.tokens, None)
        errors = [
            message(weights.load, output / "absent", "huggingface"),
            message(weights.load_into, model, state),
            message(weights.save_huggingface, model, config, name),
        ]
        (output / f"errors-{distributed.rank()}.json").write_text(json.dumps(errors))


def message(action: object, *args: object) -> str:
    try:
        action(*args)
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    for parallel in ("data", "tensor", "pipeline"):
        for model_folder, golden in (given.split("=") for given in sys.argv[2:]):
            run(Path(sys.argv[1]), parallel, Path(model_folder), Path(golden))
    distributed.barrier()
