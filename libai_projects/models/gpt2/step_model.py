"""GPT-2 one step at a time, for generation."""

from __future__ import annotations

import math

from oneflow_accel.kernels.linear import decoder_layer

import oneflow as flow

from libai_projects.models.attention import Past
from libai_projects.models.gpt2.model import Block, GPT2ForPreTraining, GPT2Model
from libai_projects.models.linear import LocalLinear
from libai_projects.models.step_model import StepModel


class GPT2StepModel(StepModel):
    """A GPT-2 that generation can step through. Its weights are read now: load them before."""

    def __init__(self, model: GPT2ForPreTraining | GPT2Model) -> None:
        gpt = model.GPT_model if isinstance(model, GPT2ForPreTraining) else model
        super().__init__(
            embeddings=gpt.embeddings,
            layers=gpt.transformer.layers,
            norm=gpt.transformer.layernorm_f,
            head=gpt.embeddings.token_embeddings.weight,
            vocab_size=gpt.options.real_vocabulary,
            max_positions=gpt.options.max_seq_length,
            fused_softmax=bool(gpt.options.scale_mask_softmax_fusion),
        )

    def _layer(self, layer: Block) -> Block | OneTokenBlock:
        linears = (
            layer.self_attention.query_key_value,
            layer.self_attention.dense,
            layer.mlp.dense_h_to_4h,
            layer.mlp.dense_4h_to_h,
        )
        whole = len(self._place.group) == 1 and all(isinstance(x, LocalLinear) for x in linears)
        return OneTokenBlock(layer, linears) if whole else layer


class OneTokenBlock:
    """A block of whole, dense weights, which takes one more token in one operation."""

    def __init__(self, block: Block, linears: tuple[LocalLinear, ...]) -> None:
        self._block = block
        parts = (block.input_layernorm, *linears[:2], block.post_attention_layernorm, *linears[2:])
        self._weights = [tensor for part in parts for tensor in (part.weight, part.bias)]
        self._settings = {
            "scale": 1.0 / math.sqrt(block.self_attention.head_size),
            "epsilon": block.input_layernorm.eps,
            "tanh": block.mlp.approximate == "tanh",
        }

    def __call__(self, x: flow.Tensor, past: Past) -> flow.Tensor:
        held = past.held
        if held is None or past.hidden is not None or x.shape[1] > 1:
            return self._block(x, past)
        x, key, value = decoder_layer(x, *held, *self._weights, **self._settings)
        past.keep(key, value)
        return x
