"""LiBai's layers, fused and not, on two tensor-parallel processes: prints "equal" and a name."""

from __future__ import annotations

import copy

import oneflow_accel  # noqa: F401

import numpy as np
import oneflow as flow
from libai.layers import MLP, MultiheadAttention
from libai.utils import distributed
from omegaconf import OmegaConf
from oneflow import nn

from tests.tolerances import assert_close

HIDDEN, HEADS, SEQUENCE, BATCH = 48, 4, 9, 2


def _step(layer: nn.Module, inputs: list[flow.Tensor], graph: bool) -> list[np.ndarray]:
    """The output and, in eager mode, the gradients of its sum of squares."""
    flow.manual_seed(3)
    if graph:

        class Graph(nn.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def build(self, *tensors: flow.Tensor) -> flow.Tensor:
                return self.layer(*tensors)

        return [distributed.tton(Graph()(*inputs))]
    y = layer(*inputs)
    (y * y).sum().backward()
    gradients = [distributed.tton(parameter.grad) for parameter in layer.parameters()]
    for parameter in layer.parameters():
        parameter.grad = None
    return [distributed.tton(y), *gradients]


def main() -> None:
    distributed.setup_dist_util(
        OmegaConf.create(
            {
                "data_parallel_size": 1,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
                "pipeline_num_layers": 1,
                "device_type": "cpu",
            }
        )
    )
    flow.manual_seed(1)
    place = {
        "placement": distributed.get_layer_placement(0),
        "sbp": distributed.get_nd_sbp([flow.sbp.broadcast, flow.sbp.broadcast]),
    }
    x = flow.randn(BATCH, SEQUENCE, HIDDEN, **place)
    # LiBai's own masks are int8; the fused operator takes truth values only.
    mask = flow.tril(flow.ones(SEQUENCE, SEQUENCE, **place)).expand(BATCH, 1, -1, -1) > 0
    mlp = MLP(HIDDEN, 4 * HIDDEN, output_dropout_prob=0.1)
    fused_mlp = copy.deepcopy(mlp)
    fused_mlp.bias_gelu_fusion = fused_mlp.dense_h_to_4h.skip_bias_add = True
    fused_mlp.bias_dropout_fusion = fused_mlp.dense_4h_to_h.skip_bias_add = True
    attention = MultiheadAttention(HIDDEN, HEADS, output_dropout_prob=0.1)
    fused_attention = copy.deepcopy(attention)
    fused_attention.scale_mask_softmax_fusion = True
    fused_attention.bias_dropout_fusion = fused_attention.dense.skip_bias_add = True
    cases = {
        "MLP": (mlp, fused_mlp, [x], [x]),
        "attention": (
            attention,
            fused_attention,
            [x, None, mask.to(flow.float32)],
            [x, None, mask],
        ),
    }
    for name, (plain, fused, inputs, fused_inputs) in cases.items():
        actual = _step(fused, fused_inputs, graph=False)
        for one, other in zip(actual, _step(plain, inputs, graph=False), strict=True):
            assert_close(one, other, reduced=HIDDEN)
        # Patched libai draws masks with flow.rand here, which follows the seed in a graph too.
        (in_graph,) = _step(fused, fused_inputs, graph=True)
        assert_close(in_graph, actual[0])
        if flow.env.get_rank() == 0:
            print(f"equal {name}\n", end="", flush=True)


if __name__ == "__main__":
    main()
