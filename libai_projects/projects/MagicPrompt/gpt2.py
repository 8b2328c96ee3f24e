"""GPT-2 (Radford et al. 2019) on LiBai's parallel layers, for training and evaluation.

Parameter names and shapes are those of LiBai 0.1.1's GPT, so that its checkpoints load. Generation
does not run through here: `step_model.py` computes token by token on the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflow_accel.distributed import set_value
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.dropout import HIDDEN

import oneflow as flow
from libai.layers import LayerNorm, LMLogits
from libai.utils import distributed as dist
from oneflow import nn

from libai_projects.projects.MagicPrompt import model_options
from libai_projects.projects.MagicPrompt.layers import Block, GPT2Embedding, TokenLosses
from libai_projects.projects.MagicPrompt.model_options import ModelOptions
from libai_projects.weights.initial import initial_weights
from libai_projects.weights.mapping import PREFIX


class Transformer(nn.Module):
    """The blocks and the last layer norm, each on its pipeline stage."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Block(options, layer_idx=index) for index in range(options.num_layers)]
        )
        self.layernorm_f = LayerNorm(
            options.hidden_size, eps=options.layernorm_epsilon, layer_idx=-1
        )

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        """(batch, time, hidden) to the same on the last stage."""
        for layer in self.layers:
            x = layer(x)
        return self.layernorm_f(x)


class GPT2Model(nn.Module):
    """Tokens to logits.

    Its weights depend on the seed of OneFlow's default generator (`flow.manual_seed`) and their
    names only, so that they are the same in every layout.

    Args:
        cfg: `cfg.model.cfg` or ModelOptions; see `model_options.ModelOptions`.

    Raises:
        UserError: an option is missing or impossible, or does not fit the parallel layout.
    """

    def __init__(self, cfg: Mapping[str, Any] | ModelOptions) -> None:
        super().__init__()
        if not isinstance(cfg, ModelOptions):
            cfg = model_options.from_config(cfg, dist.get_tensor_parallel_size())
        self.options = cfg
        self.embeddings = GPT2Embedding(cfg)
        self.transformer = Transformer(cfg)
        self.lm_head = LMLogits(cfg.vocab_size, bias=False)
        parameters = dict(self.named_parameters())
        for name, array in initial_weights(vars(cfg), flow.initial_seed()):
            set_value(parameters[name.removeprefix(PREFIX)], array)

    def forward(self, input_ids: flow.Tensor) -> flow.Tensor:
        """Logits of every position.

        Args:
            input_ids: (batch, time) int64 on the first stage, sbp [S(0), B].

        Returns:
            (batch, time, vocab_size) on the last stage, sbp [S(0), S(2)]; those of padding rows
            of the vocabulary are so low that softmax makes them 0.

        Raises:
            UserError: there are more tokens than positions.
        """
        time = input_ids.shape[1]
        if time > self.options.max_seq_length:
            raise UserError(
                f"sequences of {time} tokens, but the model has {self.options.max_seq_length} "
                "positions: shorten them, or train a model with a larger model.cfg.max_seq_length"
            )
        # Read once: of two reads in a graph, ZeRO and pipeline parallelism would send the
        # variable itself to another process.
        token_weight = self.embeddings.token_embeddings.read_weight()
        hidden = self.transformer(self.embeddings(input_ids, token_weight))
        logits = self.lm_head(hidden, token_weight)
        if self.options.real_vocabulary == self.options.vocab_size:
            return logits
        return logits + self._padding_penalty(logits)

    def _padding_penalty(self, logits: flow.Tensor) -> flow.Tensor:
        """(vocab_size,): 0, and HIDDEN at padding rows."""
        column = flow.arange(
            self.options.vocab_size,
            dtype=flow.int32,
            placement=logits.placement,
            sbp=dist.get_nd_sbp([flow.sbp.broadcast, flow.sbp.split(0)]),
        )
        return (column >= self.options.real_vocabulary).to(logits.dtype) * HIDDEN


class GPT2ForPreTraining(nn.Module):
    """GPT2Model with its loss, as LiBai's trainer and evaluation call it.

    Args:
        cfg: `cfg.model.cfg`.
    """

    returns_token_losses = True
    """Tells LiBai's (patched) evaluation to pass labels and take losses of single tokens."""

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        super().__init__()
        self.GPT_model = GPT2Model(cfg)
        self.loss_func = TokenLosses()

    def forward(
        self, input_ids: flow.Tensor, labels: flow.Tensor | None = None
    ) -> dict[str, flow.Tensor]:
        """Losses, or logits where there are no labels.

        Args:
            input_ids: (batch, time) int64, sbp [S(0), B].
            labels: (batch, time) int64, the token after each; a negative one does not count.

        Returns:
            In training {"lm_loss": mean over the tokens that count}. In evaluation
            {"token_losses": (batch, time), "token_mask": the same, 1 where a token counts}. Without
            labels {"prediction_scores": logits}.
        """
        logits = self.GPT_model(input_ids)
        if labels is None:
            return {"prediction_scores": logits}
        losses, counted = self.loss_func(logits, labels)
        if not self.training:
            return {"token_losses": losses, "token_mask": counted}
        # The sum over split labels is partial; partial by partial cannot be divided.
        count = counted.sum().to_global(sbp=dist.get_nd_sbp([flow.sbp.broadcast] * 2))
        return {"lm_loss": losses.sum() / count.clamp(min=1.0)}

    @staticmethod
    def set_pipeline_stage_id(model: nn.Module) -> None:
        """Give each part of a graph's `model` its pipeline stage."""
        for part in model.modules():
            module = part.to(nn.Module)
            if isinstance(module, GPT2Embedding):
                dist.set_stage(part, 0)
            elif isinstance(module, Block):
                dist.set_stage(part, module.layer_idx)
            elif isinstance(module, (LMLogits, TokenLosses)):
                dist.set_stage(part, -1)
        dist.set_stage(model.GPT_model.transformer.layernorm_f, -1)
