"""Finds what is wrong with a run before it starts, on every rank, and says it once.

LiBai finds most of this by an assertion deep inside, minutes later, or not at all: it clamps
parallel sizes to the number of processes and divides by zero on data without a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oneflow_accel import distributed
from oneflow_accel.agree import agree, require_same
from oneflow_accel.errors import UserError

from libai.config import try_get_key
from omegaconf import DictConfig

from libai_projects.engine import check_files, check_settings
from libai_projects.engine.arguments import Options
from libai_projects.models import families


@dataclass(frozen=True)
class Layout:
    """Processes along each way of sharing the work; their product is the world size."""

    data: int
    tensor: int
    pipeline: int


def check_run(cfg: DictConfig, options: Options) -> None:
    """Check a run and complete its batch sizes; every process calls it. The UserError lists
    everything that is wrong, each with what to do, and is the same on all ranks."""
    problems: list[str] = []

    def note(check: Callable[[], object]) -> bool:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
            return False
        return True

    world_size = distributed.world_size()
    layouts: list[Layout] = []
    if note(lambda: check_settings.check_numbers(cfg)):
        if note(lambda: layouts.append(check_layout(cfg, world_size))):
            note(lambda: check_model(cfg, layouts[0]))
            note(lambda: complete_batch_sizes(cfg, layouts[0]))
        check_settings.check_all(cfg, note)
        check_files.check_all(cfg, options, note)
    # A file may be missing on one node only, or be another one there.
    agree(problems)
    require_same(check_files.contents(cfg))


def check_layout(cfg: DictConfig, world_size: int) -> Layout:
    """The parallel layout of a config; a UserError where it does not fit `world_size` processes."""
    sizes = {}
    for name in ("tensor", "pipeline", "data"):
        key = f"train.dist.{name}_parallel_size"
        size = try_get_key(cfg, key, default=None if name == "data" else 1)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise UserError(f"{key}={size}: it counts processes, from 1 on")
        sizes[name] = size
    tensor, pipeline = sizes["tensor"], sizes["pipeline"]
    if world_size % (tensor * pipeline):
        raise UserError(
            f"train.dist: tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline} needs "
            f"a multiple of {tensor * pipeline} processes, and there are {world_size}; start "
            f"{tensor * pipeline} (the number after the config in train.sh) or change the sizes"
        )
    data = world_size // (tensor * pipeline)
    # LiBai's configs set 1 by default, so a 1 is not a decision of the user.
    if sizes["data"] not in (None, 1, data):
        raise UserError(
            f"train.dist.data_parallel_size={sizes['data']}: {world_size} processes / "
            f"(tensor {tensor} x pipeline {pipeline}) leave {data}; leave the key out, or start "
            f"{sizes['data'] * tensor * pipeline} processes"
        )
    return Layout(data, tensor, pipeline)


def check_model(cfg: DictConfig, layout: Layout) -> None:
    """Check that the layout divides the model, and that sequences fit its positions."""
    model = try_get_key(cfg, "model.cfg", default=None)
    if model is None:
        return
    families.check_model(try_get_key(cfg, "model._target_", default=None), model, layout.tensor)
    problems = [*_stages(cfg, layout), *_sequences(cfg)]
    if problems:
        raise UserError("\n  - ".join(problems))


def _stages(cfg: DictConfig, layout: Layout) -> list[str]:
    layers = cfg.model.cfg.get("num_layers")
    stage_of_layer = try_get_key(cfg, "train.dist.custom_pipeline_stage_id", default=None)
    if layout.pipeline == 1 or not layers:
        return []
    if stage_of_layer is not None:
        stages = list(stage_of_layer)
        if len(stages) != layers or stages != sorted(stages):
            return [
                f"train.dist.custom_pipeline_stage_id={stages}: it names the stage of each of the "
                f"{layers} layers in rising order, and there are {len(stages)} entries"
            ]
        if set(stages) != set(range(layout.pipeline)):
            return [
                f"train.dist.custom_pipeline_stage_id={stages}: each of the stages 0 to "
                f"{layout.pipeline - 1} needs a layer"
            ]
        return []
    problems = []
    if layers % layout.pipeline:
        problems.append(
            f"train.dist.pipeline_parallel_size={layout.pipeline} does not divide "
            f"model.cfg.num_layers={layers}; take a divisor, or say which stage each layer goes to "
            "with train.dist.custom_pipeline_stage_id=[...]"
        )
    counted = try_get_key(cfg, "train.dist.pipeline_num_layers", default=None)
    if counted is not None and counted != layers:
        problems.append(
            f"train.dist.pipeline_num_layers={counted}, but model.cfg.num_layers={layers}; "
            "leave the former out"
        )
    return problems


def _sequences(cfg: DictConfig) -> list[str]:
    positions = cfg.model.cfg.get("max_seq_length")
    problems = []
    for key, dataset in check_files.datasets(cfg):
        length = dataset.get("max_seq_length")
        if length and positions and length > positions:
            problems.append(
                f"{key}.max_seq_length={length}: the model has "
                f"model.cfg.max_seq_length={positions} positions; shorten one or raise the other"
            )
    return problems


def complete_batch_sizes(cfg: DictConfig, layout: Layout) -> None:
    """Fill in the batch size that is left out: global = micro x data parallel x accumulation."""
    train = cfg.train
    micro, steps, total = (
        train.get(name)
        for name in ("train_micro_batch_size", "num_accumulation_steps", "global_batch_size")
    )
    rule = (
        "global_batch_size = train_micro_batch_size x data parallel processes "
        f"({layout.data} here) x num_accumulation_steps"
    )
    if micro is None and total is None:
        raise UserError(f"set train.train_micro_batch_size or train.global_batch_size: {rule}")
    if total is not None:
        known = (micro or 1) * layout.data * (steps or 1)
        wrong = total != known if micro and steps else total % known
        if wrong:
            given = ", ".join(
                f"{name}={train[name]}"
                for name in (
                    "global_batch_size",
                    "train_micro_batch_size",
                    "num_accumulation_steps",
                )
                if train.get(name) is not None
            )
            raise UserError(
                f"train: {given} contradict each other: {rule}; set one of them to null"
            )
        if micro is None:
            micro = total // (layout.data * (steps or 1))
        steps = total // (layout.data * micro)
    train.train_micro_batch_size = micro
    train.num_accumulation_steps = steps or 1
    train.global_batch_size = micro * layout.data * (steps or 1)
