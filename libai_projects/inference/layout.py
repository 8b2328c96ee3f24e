"""How the processes of a job are laid out for generation: data x tensor x pipeline parallel."""

from __future__ import annotations

from dataclasses import dataclass

from oneflow_accel.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; their product is the number of processes."""

    data: int
    tensor: int
    pipeline: int

    def __str__(self) -> str:
        return f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}"


def choose_layout(
    processes: int,
    *,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> Layout:
    """Fill in the sizes that were not named so that all `processes` are used.

    Tensor parallelism takes two processes where it can, the pipeline the rest: 4 processes and
    nothing named are tensor 2 x pipeline 2. Data parallelism is used only when it is named or
    when both others are, because a single prompt gains nothing from it.

    Raises:
        UserError: the sizes named cannot make up `processes`.
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


def check_layout(
    layout: Layout,
    *,
    layers: int,
    heads: int,
    stage_ids: list[int] | None = None,
    pipeline_num_layers: int | None = None,
) -> None:
    """Check a layout against the model's sizes.

    Args:
        layers, heads: of the model.
        stage_ids: the stage of each layer, where given by hand.
        pipeline_num_layers: what the caller believes the number of layers is; None: not said.

    Raises:
        UserError: the model cannot be cut that way.
    """
    if heads % layout.tensor:
        raise UserError(
            f"{heads} attention heads cannot be split over tensor-parallel size {layout.tensor}: "
            f"choose a divisor of {heads} with --tensor-parallel"
        )
    if pipeline_num_layers is not None and layout.pipeline > 1 and pipeline_num_layers != layers:
        raise UserError(
            f"pipeline_num_layers is {pipeline_num_layers}, but the model has {layers} layers: "
            "give the model's number, or leave it out"
        )
    if stage_ids is None:
        if layers % layout.pipeline:
            raise UserError(
                f"{layers} layers cannot be split into {layout.pipeline} pipeline stages of "
                f"equal size: choose a divisor of {layers} with --pipeline-parallel"
            )
        return
    if len(stage_ids) != layers:
        raise UserError(f"pipeline_stage_id names {len(stage_ids)} layers; the model has {layers}")
    if sorted(stage_ids) != list(stage_ids) or set(stage_ids) != set(range(layout.pipeline)):
        raise UserError(
            f"pipeline_stage_id {stage_ids}: must rise from 0 to {layout.pipeline - 1} "
            "without leaving a stage out"
        )
