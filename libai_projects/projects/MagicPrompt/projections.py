"""The linear layers of a block: LiBai's dense ones, or Monarch layers where the options say so."""

from __future__ import annotations

import oneflow as flow
from libai.layers import Linear
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt.model_options import ModelOptions
from libai_projects.weights.monarch import QKV, QKV_PARTS
from monarch_flow.layers import LinearConfig
from monarch_flow.parallel import SPLIT, WHOLE, ParallelMonarchLinear


def drawn_later(tensor: flow.Tensor) -> flow.Tensor:
    """An initializer for LiBai's layers: the model draws its weights when it is whole, by name."""
    return tensor


def projection(
    options: ModelOptions,
    part: str,
    in_features: int,
    out_features: int,
    *,
    parallel: str,
    skip_bias_add: bool = False,
    layer_idx: int,
) -> nn.Module:
    """A linear layer of a block.

    Args:
        options: say whether it is a Monarch layer.
        part: of `weights.monarch.layers`.
        in_features: width of its input.
        out_features: width of its output.
        parallel: "col" or "row", LiBai's names: the outputs or the inputs are split over tensor
            parallelism, the other side is whole.
        skip_bias_add: return (product, bias) and not the sum.
        layer_idx: layer, from which the pipeline stage follows.
    """
    config = options.monarch_layers().get(part)
    if config is None:
        return Linear(
            in_features,
            out_features,
            parallel=parallel,
            init_method=drawn_later,
            skip_bias_add=skip_bias_add,
            layer_idx=layer_idx,
        )
    if part == QKV:
        return QueryKeyValue(config, in_features, options.head_size, layer_idx=layer_idx)
    return MonarchProjection(
        config,
        in_features,
        out_features,
        parallel=parallel,
        skip_bias_add=skip_bias_add,
        layer_idx=layer_idx,
    )


class MonarchProjection(ParallelMonarchLinear):
    """A Monarch layer in the place of LiBai's Linear.

    Args:
        config: the layer.
        in_features: width of its input.
        out_features: width of its output.
        parallel: "col" or "row", LiBai's names: the outputs or the inputs are split over tensor
            parallelism, the other side is whole.
        skip_bias_add: return (product, bias) and not the sum.
        layer_idx: layer, from which the pipeline stage follows.
    """

    def __init__(
        self,
        config: LinearConfig,
        in_features: int,
        out_features: int,
        *,
        parallel: str,
        skip_bias_add: bool = False,
        layer_idx: int,
    ) -> None:
        layout = dist.get_dist_util()
        # The axis of tensor parallelism is the last one of a placement, where there is one.
        axis = None
        if layout.is_tensor_model_parallel():
            axis = 1 if layout.is_data_parallel() else 0
        super().__init__(
            config.build(in_features, out_features),
            dist.get_layer_placement(layer_idx),
            axis,
            SPLIT if parallel == "col" else WHOLE,
        )
        self.skip_bias_add = skip_bias_add

    def forward(self, x: flow.Tensor) -> flow.Tensor | tuple[flow.Tensor, flow.Tensor]:
        """(batch, time, in_features) to (batch, time, out_features), and the bias if skipped."""
        if self.skip_bias_add:
            return self.matmul(x), self.read_bias()
        # Not super(): in a graph `self` is a stand-in of the module.
        return ParallelMonarchLinear.forward(self, x)


class QueryKeyValue(nn.Module):
    """Queries, keys and values by three Monarch layers, interleaved by head as one dense layer
    gives them.

    Args:
        config: of each of the layers.
        in_features: width of the input.
        head_size: of each head.
        layer_idx: layer, from which the pipeline stage follows.
    """

    def __init__(
        self, config: LinearConfig, in_features: int, head_size: int, *, layer_idx: int
    ) -> None:
        super().__init__()
        self.head_size = head_size
        for name in QKV_PARTS:
            layer = MonarchProjection(
                config, in_features, in_features, parallel="col", layer_idx=layer_idx
            )
            setattr(self, name, layer)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to (batch, time, 3 hidden), the last axis (heads, 3, head size),
        split over heads."""
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return interleave(parts, self.head_size)


def interleave(parts: list[flow.Tensor], head_size: int) -> flow.Tensor:
    """Three tensors (batch, time, heads x head size) as one of (batch, time, heads x 3 x head
    size)."""
    batch, time, width = parts[0].shape
    heads = [part.reshape(batch, time, width // head_size, head_size) for part in parts]
    return flow.cat(heads, dim=3).reshape(batch, time, 3 * width)
