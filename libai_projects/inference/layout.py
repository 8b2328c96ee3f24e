"""How the processes of a job are laid out for generation: data x tensor x pipeline parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow_accel.errors import UserError

from libai_projects.engine.checks import Layout


def check_stages(stages: Any) -> list[int] | None:
    """The stage of each layer, or None; a UserError unless whole numbers rise from 0 by ones."""
    if stages is None:
        return None
    several = isinstance(stages, Sequence) and not isinstance(stages, str)
    whole = several and all(type(stage) is int for stage in stages)
    if not whole or sorted(set(stages)) != list(range(len(set(stages)))) or not stages:
        raise UserError(
            f"pipeline_stage_id {stages!r:.80}: expected the stage of each layer, from 0 on, such "
            "as 0,0,0,1 for four layers on two stages"
        )
    return list(stages)


def choose_layout(
    processes: int,
    *,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> Layout:
    """Fill in the sizes that were not named so that all `processes` are used, or raise UserError.

    Tensor parallelism takes two processes where it can, the pipeline the rest. Data parallelism is
    used only when it or both others are named: a single prompt gains nothing from it.
    """
    named = {"data": data, "tensor": tensor, "pipeline": pipeline}
    for axis, size in named.items():
        if size is not None and size < 1:
            raise UserError(f"--{axis}-parallel {size}: must be at least 1")
    product = (data or 1) * (tensor or 1) * (pipeline or 1)
    rest, remainder = divmod(processes, product)
    if remainder or rest == 0 or (rest > 1 and None not in named.values()):
        sizes = " x ".join(f"{axis} {size}" for axis, size in named.items() if size is not None)
        count = "1 process does" if processes == 1 else f"{processes} processes do"
        raise UserError(
            f"{count} not fit the layout {sizes}: launch with "
            f"--nproc_per_node {product}, or change the sizes (--data-parallel, "
            "--tensor-parallel, --pipeline-parallel)"
        )
    if tensor is None and pipeline is None:
        tensor = 2 if rest % 2 == 0 else 1
        pipeline = rest // tensor
    elif tensor is None:
        tensor = rest
    elif pipeline is None:
        pipeline = rest
    elif data is None:
        data = rest
    return Layout(data or 1, tensor or 1, pipeline or 1)
