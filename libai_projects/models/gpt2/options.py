"""The options of the model, `cfg.model.cfg`, checked, with the fusions resolved for the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from oneflow_accel.backends import kernels_of
from oneflow_accel.kernels import registry

from libai.utils import distributed as dist

from flow_train.config.keys import Amount, Positive
from libai_projects.models.options import ModelOptions

logger = logging.getLogger(__name__)

M = TypeVar("M", bound="GPT2Options")

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none", "relu": None}
"""Option `activation` to the `approximate` argument of OneFlow's gelu; None: it is another."""
FUSIONS = (
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "scale_mask_softmax_fusion",
    "attention_fusion",
)


class GPT2Options(ModelOptions, frozen=True):
    """GPT-2's options.

    `activation` is "gelu_tanh", GPT-2's, "gelu", the erf form, the only one that bias_gelu_fusion
    has, or "relu". `attention_fusion` applies where a kernel drops out weights, or none is
    dropped. `apply_query_key_layer_scaling` divides the scores by the layer's number inside the
    product and multiplies back, for the range of half precision;
    `scale_attn_by_inverse_layer_idx` divides them. Without `tie_word_embeddings` the weight of the
    logits is not the token embedding.
    """

    # Whether a token sees those before it only.
    causal: ClassVar[bool] = True

    ffn_hidden_size: Positive
    layernorm_epsilon: Amount = 1e-5
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    bias_gelu_fusion: bool | None = None
    bias_dropout_fusion: bool | None = None
    scale_mask_softmax_fusion: bool | None = None
    attention_fusion: bool | None = None
    apply_query_key_layer_scaling: bool = False
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def scale_of(self, layer_idx: int) -> float:
        """What the scores of attention in a layer, counted from 0, are multiplied by."""
        scale = 1.0 / math.sqrt(self.head_size)
        return scale / (layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale


def from_config(
    cfg: Mapping[str, Any],
    tensor_parallel_size: int = 1,
    kind: type[M] = GPT2Options,  # type: ignore[assignment]
) -> M:
    """Read the model's options, of a `kind`, and decide the fusions.

    A fusion that is None becomes what the device has; one that is True on a device without it
    becomes False with a warning: it changes the speed, not the numbers. UserError: as
    `ModelOptions.checked`, and for a vocabulary that does not fit.
    """
    options = kind.checked(cfg, tensor_parallel_size)
    options.check_vocabulary()
    return options.model_copy(update={name: _decide(name, options) for name in FUSIONS})


def _decide(name: str, options: GPT2Options) -> bool:
    wanted = getattr(options, name)
    if wanted is False:
        return False
    reason = ""
    if name == "attention_fusion" and not _has_attention():
        reason = "this device has no attention operator"
    if name == "bias_gelu_fusion" and options.activation != "gelu":
        reason = "the fused operator is the erf form, and model.cfg.activation is another"
    if reason and wanted:
        logger.warning("model.cfg.%s is on but %s; it is computed unfused", name, reason)
    return not reason and (name == "attention_fusion" or dist.can_fuse(wanted))


def _has_attention() -> bool:
    backend = kernels_of(dist.get_backend().name)
    return any(
        each.backend == backend and not each.never_run and not each.missing_reasons()
        for each in registry.operations()["packed_attention"].implementations
    )
