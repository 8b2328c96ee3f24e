"""The language models of this project: what a config's model is, its table of weights, and how it
generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oneflow_accel.errors import UserError

from oneflow import nn

from libai_projects.models.bert.model import BertOptions, BertPretrainingModel
from libai_projects.models.gpt2.model import GPT2ForPreTraining, GPT2StepModel
from libai_projects.models.gpt2.options import GPT2Options
from libai_projects.models.llama import options as llama
from libai_projects.models.llama.model import LlamaForPreTraining, LlamaStepModel
from libai_projects.models.options import check_division
from libai_projects.models.step_model import StepModel
from libai_projects.weights.bert import BERT
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.llama import LLAMA
from libai_projects.weights.table import Table


@dataclass(frozen=True)
class Family:
    """`check` raises a UserError where options of the model cannot be, of a `cfg.model.cfg` and the
    number of processes that share each layer; `model` is what trains, `steps` makes of one what
    generation steps through, None where it does not generate."""

    table: Table
    check: Callable[[Mapping[str, Any], int], object]
    model: type[nn.Module]
    steps: Callable[..., StepModel] | None


FAMILIES = (
    Family(GPT2, GPT2Options.checked, GPT2ForPreTraining, GPT2StepModel),
    Family(LLAMA, llama.check, LlamaForPreTraining, LlamaStepModel),
    Family(BERT, BertOptions.checked, BertPretrainingModel, None),
)


def family_of(target: Any) -> Family:
    """The family of a model that generates, its class, or the `_target_` of a config; a UserError
    for another."""
    found = _find(target)
    if found is None or found.steps is None:
        known = " and ".join(family.table.title for family in FAMILIES if family.steps)
        raise UserError(f"the model {target} cannot generate here; those that can: {known}")
    return found


def check_model(target: Any, model: Mapping[str, Any], tensor_parallel_size: int) -> None:
    """Raise a UserError for options that the model cannot have; of models of others, such as
    LiBai's own GPT, for sizes that do not divide."""
    found = _find(target)
    (check_division if found is None else found.check)(model, tensor_parallel_size)


def table_of(target: Any) -> Table:
    """The table of its weights; GPT-2's for models of others, such as LiBai's own GPT."""
    found = _find(target)
    return GPT2 if found is None else found.table


def _find(target: Any) -> Family | None:
    if isinstance(target, nn.Module):
        target = type(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    last = name.rpartition(".")[2]
    return next((family for family in FAMILIES if family.model.__name__ == last), None)
