"""A tiny GPT-2 on one process with the reference's weights, for test_gpt2_*.py."""

from __future__ import annotations

import numpy as np
import oneflow as flow
from libai.utils import distributed as dist
from omegaconf import OmegaConf

from libai_projects.models.gpt2.model import GPT2ForPreTraining
from tests.libai_projects import reference_gpt2
from tests.libai_projects.reference_gpt2 import Shape, State

LAYER = "monarch_flow.layers.MonarchLinear"
# Structured layers in all places, of each kind.
MONARCH = {
    "mlp_cfg": {"_target_": LAYER, "nblocks": 4},
    "attnlinear_cfg": "monarch",
    "attnproj_cfg": {"_target_": "src.models.layers.monarch_linear.MonarchLinear", "nblocks": 2},
}
BLOCKS = {
    "mlp_cfg": "blockdiag",
    "attnlinear_cfg": {"_target_": "monarch_flow.layers.BlockdiagLinear", "nblocks": 2},
    # 64 -> 64: 3 does not divide it.
    "attnproj_cfg": {"_target_": "blockdiag", "nblocks": 3},
}


def make(state: State, shape: Shape, **options: object) -> GPT2ForPreTraining:
    """The model of an HF-named state dict, in evaluation; `options` replace those of `shape`."""
    layout = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    dist.setup_dist_util(OmegaConf.create(layout))
    config = {
        **shape.config(),
        "layernorm_epsilon": shape.epsilon,
        **options,
    }
    model = GPT2ForPreTraining(OmegaConf.create(config))
    weights = reference_gpt2.to_libai(state, shape.heads, model.GPT_model.options.vocab_size)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        assert tuple(parameter.shape) == weights[name].shape, name
        parameter.data.copy_(place(weights[name]))
    return model.eval()


def place(values: np.ndarray) -> flow.Tensor:
    return flow.tensor(values, placement=dist.get_layer_placement(0), sbp=dist.get_hidden_sbp())


def logits(model: GPT2ForPreTraining, ids: np.ndarray) -> np.ndarray:
    with flow.no_grad():
        return model(place(ids))["prediction_scores"].numpy()
