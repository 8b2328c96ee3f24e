"""The options of the model, `cfg.model.cfg`."""

from __future__ import annotations

from typing import ClassVar, Literal

from flow_train.config.keys import Amount, Positive
from libai_projects.models.gpt2.options import GPT2Options


class BertOptions(GPT2Options, frozen=True):
    """GPT-2's options with BERT's defaults. `num_tokentypes` are the kinds of sentences, of which
    a pair has two; with `masked_lm_only` there is no head for the order of sentences."""

    causal: ClassVar[bool] = False

    num_tokentypes: Positive = 2
    masked_lm_only: bool = False
    layernorm_epsilon: Amount = 1e-12
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu"
    use_scaled_init_for_output_weights: bool = False
