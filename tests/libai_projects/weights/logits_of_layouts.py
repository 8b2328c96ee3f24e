"""Logits of the OneFlow model with loaded weights, and its export (test_weights_of_the_model.py).

    logits_of_layouts.py OUTPUT TENSOR,PIPELINE[ TENSOR,PIPELINE ...] MODE=FOLDER=REFERENCE ...

REFERENCE has input_ids and logits. Rank 0 writes OUTPUT/<model>-<tensor>-<pipeline>.npz and exports
to the folder of the same name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import oneflow_accel  # noqa: F401

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from libai_projects import weights
from libai_projects.models.gpt2.model import GPT2ForPreTraining


def everywhere(x: flow.Tensor) -> np.ndarray:
    whole = x.to_global(sbp=[flow.sbp.broadcast] * len(x.sbp))
    both = flow.placement.all(x.placement.type)
    return whole.to_global(placement=both, sbp=flow.sbp.broadcast).numpy()


def run(output: Path, layout: str, kind: str, folder: Path, reference: Path) -> None:
    tensor, pipeline = map(int, layout.split(","))
    state, config = weights.load(folder, kind, overrides={"num_attention_heads": 4})
    dist.setup_dist_util(
        OmegaConf.create(
            {
                "data_parallel_size": 1,
                "tensor_parallel_size": tensor,
                "pipeline_parallel_size": pipeline,
                "pipeline_num_layers": config["num_layers"],
            }
        )
    )
    # Padded, as a trainer does for tensor parallelism.
    config["vocab_size"] = -(-config["vocab_size"] // 128) * 128
    model = GPT2ForPreTraining(config).eval()
    weights.load_into(model, state)
    with np.load(reference) as arrays, flow.no_grad():
        ids = flow.tensor(
            arrays["input_ids"], placement=dist.get_layer_placement(0), sbp=dist.get_hidden_sbp()
        )
        actual = everywhere(model(ids)["prediction_scores"])
        expected = arrays["logits"]
    name = output / f"{folder.name}-{tensor}-{pipeline}"
    if flow.env.get_rank() == 0:
        np.savez(f"{name}.npz", actual=actual, expected=expected)
    weights.save_huggingface(model, config, name)


def main() -> None:
    output, layouts, *models = sys.argv[1:]
    for layout in layouts.split():
        for model in models:
            kind, folder, reference = model.split("=")
            run(Path(output), layout, kind, Path(folder), Path(reference))


if __name__ == "__main__":
    main()
