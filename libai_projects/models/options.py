"""The options that language models share, of `cfg.model.cfg`, and what must hold for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from oneflow_accel.errors import UserError

from pydantic import ConfigDict, ValidationError

from flow_train.config.keys import Amount, Below1, Positive
from flow_train.config.schema import Group, Schema
from libai_projects.weights import monarch
from monarch_flow.layers import LinearConfig
from monarch_flow.parallel import check_blocks

M = TypeVar("M", bound="ModelOptions")


class ModelOptions(Group, frozen=True):
    """A model's sizes and switches, named as in `cfg.model.cfg`, whose other keys are left alone.
    `vocab_size` counts padding rows, which begin at `vocab_size_real`. The last three make Monarch
    layers, see `weights.monarch`."""

    model_config = ConfigDict(extra="ignore")

    num_layers: Positive
    vocab_size: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    max_seq_length: Positive = 1024
    embedding_dropout_prob: Below1 = 0.0
    attention_dropout_prob: Below1 = 0.0
    output_dropout_prob: Below1 = 0.0
    initializer_range: Amount = 0.02
    use_scaled_init_for_output_weights: bool = True
    amp_enabled: bool = False
    vocab_size_real: Positive | None = None
    mlp_cfg: Any = None
    attnlinear_cfg: Any = None
    attnproj_cfg: Any = None

    def monarch_layers(self) -> dict[str, LinearConfig]:
        """The layers of a block that are Monarch layers, see `weights.monarch.layers`."""
        return monarch.layers({key: getattr(self, key) for key in monarch.KEYS})

    @property
    def real_vocabulary(self) -> int:
        return self.vocab_size if self.vocab_size_real is None else self.vocab_size_real

    @classmethod
    def checked(cls: type[M], cfg: Mapping[str, Any], tensor_parallel_size: int) -> M:
        """Read `cfg.model.cfg`, where null stands for a default. A UserError lists what is missing,
        out of range, or does not divide, whatever the vocabulary."""
        given = {str(name): cfg[name] for name in cfg if cfg[name] is not None}
        try:
            options = cls.model_validate(given)
        except ValidationError as error:
            wrong = {name: given.get(name) for name in (each["loc"][0] for each in error.errors())}
            messages = Schema(cls, prefix="model.cfg.").messages(error, wrong)
            raise UserError("\n  - ".join(messages.values())) from error
        check_division({**given, **vars(options)}, tensor_parallel_size)
        return options

    def check_vocabulary(self) -> None:
        """Raise a UserError for tokens beyond the rows that the trainer or the weights have led
        to."""
        rows = self.vocab_size
        for name, most in (("vocab_size_real", rows), ("pad_token_id", rows - 1)):
            value = getattr(self, name, None)
            if (value or 0) > most:
                raise UserError(
                    f"model.cfg.{name}={value} does not fit model.cfg.vocab_size={rows}"
                )


def check_division(model: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Raise a UserError that lists every number that does not divide; keys that are null or not
    there are left alone."""
    heads, found = "num_attention_heads", []
    for name, by in (("hidden_size", heads), (heads, "num_key_value_heads")):
        size, parts = model.get(name), model.get(by)
        if size and parts and size % parts:
            found.append(f"model.cfg.{name}={size} does not divide by model.cfg.{by}={parts}")
    for name in (heads, "num_key_value_heads", "ffn_hidden_size"):
        size = model.get(name)
        if size and size % tensor_parallel_size:
            fitting = [str(n) for n in range(1, min(size, 64) + 1) if not size % n]
            found.append(
                f"model.cfg.{name}={size} does not divide by train.dist.tensor_parallel_size="
                f"{tensor_parallel_size}; sizes that fit are {', '.join(fitting)}"
            )
    try:
        for layer in monarch.layers(model).values():
            check_blocks(monarch.nblocks(layer), tensor_parallel_size)
    except UserError as error:
        found.append(str(error))
    if found:
        raise UserError("\n  - ".join(found))
