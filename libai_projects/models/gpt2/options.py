"""The options of the model, `cfg.model.cfg`, checked, with the fusions resolved for the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oneflow_accel.backends import kernels_of
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry

from libai.utils import distributed as dist

from libai_projects.models import sizes
from libai_projects.weights import monarch
from monarch_flow.layers import LinearConfig

logger = logging.getLogger(__name__)

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}
"""Option `activation` to the `approximate` argument of OneFlow's gelu."""
FUSIONS = (
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "scale_mask_softmax_fusion",
    "attention_fusion",
)


@dataclass(frozen=True)
class ModelOptions:
    """GPT-2's sizes and switches, named as in `cfg.model.cfg`.

    `vocab_size` counts padding rows, which begin at `vocab_size_real`; `activation` is "gelu_tanh",
    GPT-2's, or "gelu", the erf form, the only one that bias_gelu_fusion has. `attention_fusion`
    applies where a kernel drops out weights, or none is dropped. `apply_query_key_layer_scaling`
    divides the scores by the layer's number inside the product and multiplies back, for the range
    of half precision. The last three make Monarch layers, see `weights.monarch`.
    """

    num_layers: int
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_seq_length: int = 1024
    embedding_dropout_prob: float = 0.0
    attention_dropout_prob: float = 0.0
    output_dropout_prob: float = 0.0
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_scaled_init_for_output_weights: bool = True
    activation: str = "gelu_tanh"
    bias_gelu_fusion: bool | None = None
    bias_dropout_fusion: bool | None = None
    scale_mask_softmax_fusion: bool | None = None
    attention_fusion: bool | None = None
    apply_query_key_layer_scaling: bool = False
    amp_enabled: bool = False
    vocab_size_real: int | None = None
    mlp_cfg: Any = None
    attnlinear_cfg: Any = None
    attnproj_cfg: Any = None

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def real_vocabulary(self) -> int:
        return self.vocab_size if self.vocab_size_real is None else self.vocab_size_real

    def monarch_layers(self) -> dict[str, LinearConfig]:
        """The parts of a block that are Monarch layers, see `weights.monarch.layers`."""
        return monarch.layers({key: getattr(self, key) for key in monarch.KEYS})


def from_config(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> ModelOptions:
    """Read the model's options and decide the fusions.

    A fusion that is None becomes what the device has; one that is True on a device without it
    becomes False with a warning: it changes the speed, not the numbers. Keys of others in
    `cfg.model.cfg` are left alone. Raises what `check` raises.
    """
    check(cfg, tensor_parallel_size)
    sizes.check_vocabulary(cfg)
    names = {field.name for field in fields(ModelOptions)}
    given = {str(name): cfg[name] for name in cfg if name in names}
    given.update({name: _decide(name, given.get(name), given) for name in FUSIONS})
    return ModelOptions(**given)


def check(cfg: Mapping[str, Any], tensor_parallel_size: int = 1) -> None:
    """A UserError says which option is missing or impossible, whatever the vocabulary."""
    required = ("num_layers", "vocab_size", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    missing = [name for name in required if cfg.get(name) is None]
    if missing:
        raise UserError(f"model.cfg lacks {', '.join(missing)}")
    sizes.check(cfg, tensor_parallel_size)
    if cfg.get("activation", "gelu_tanh") not in ACTIVATIONS:
        raise UserError(
            f"model.cfg.activation={cfg['activation']!r} is not one of {', '.join(ACTIVATIONS)}"
        )


def _decide(name: str, wanted: bool | None, given: Mapping[str, Any]) -> bool:
    if wanted is False:
        return False
    reason = ""
    if name == "attention_fusion" and not _has_attention():
        reason = "this device has no attention operator"
    if name == "bias_gelu_fusion" and given.get("activation", "gelu_tanh") != "gelu":
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
