"""Checks of split Monarch layers on one launch's processes; started by test_parallel_monarch.

The argument is a JSON list of checks. Rank 0 writes what each found, or went wrong, to NAME.out.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel import agree, distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from monarch_flow import parallel
from monarch_flow.layers import MonarchLinear
from monarch_flow.parallel import SPLIT, WHOLE, ParallelMonarchLinear

SIZES = {
    "even": (24, 48, 4),
    # Padded at the input and cropped at the output.
    "padded": (30, 46, 4),
    # Between the factors and at the output the ranks divide nothing.
    "uneven": (12, 20, 4),
}
# in, out, nblocks, input split, output split
TRAFFIC = [
    (768, 3072, 4, False, True),
    (3072, 768, 4, True, False),
    (768, 3072, 4, True, True),
    (30, 46, 4, False, False),
    (30, 46, 4, True, True),
    (12, 20, 4, False, True),
]


def gradients(data_parallel: bool = False) -> dict[str, float]:
    """Largest difference to one process's gradients over their largest, for each layout; of four
    processes two can have half of the rows each."""
    ranks = [[0, 1], [2, 3]] if data_parallel else None
    placement = oneflow_accel.current_backend().placement(ranks)
    axis, rows = (1, [flow.sbp.split(0)]) if data_parallel else (0, [])
    everywhere = [flow.sbp.broadcast] * (axis + 1)
    found = {}
    for sizes, (width, hidden, nblocks) in SIZES.items():
        flow.manual_seed(3)
        layer = MonarchLinear(width, hidden, nblocks=nblocks)
        rng = np.random.default_rng(6)
        x = rng.standard_normal((4, 5, width)).astype(np.float32)
        slope = rng.standard_normal((4, 5, hidden)).astype(np.float32)
        wanted = _gradients(layer, flow.tensor(x), flow.tensor(slope))
        for source in (flow.sbp.broadcast, flow.sbp.split(2), flow.sbp.split(0)):
            for output in (WHOLE, SPLIT):
                split = ParallelMonarchLinear(copy.deepcopy(layer), placement, axis, output)
                given = flow.tensor(x, placement=placement, sbp=everywhere)
                weights = flow.tensor(slope, placement=placement, sbp=everywhere)
                given = given.to_global(sbp=[*rows, source]).detach()
                actual = _gradients(split, given, weights)
                found[f"{sizes}, {source}, {output}"] = max(
                    float(abs(a - b).max() / abs(b).max())
                    for a, b in zip(actual, wanted, strict=True)
                )
    return found


def _gradients(layer: nn.Module, x: flow.Tensor, slope: flow.Tensor) -> list[np.ndarray]:
    """The output, and the gradients of x and of each parameter."""
    x.requires_grad_()
    y = layer(x)
    (y * slope).sum().backward()
    tensors = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [agree.whole(tensor, to=None).numpy() for tensor in tensors]


def traffic() -> list[float]:
    """For each case of TRAFFIC the numbers that all ranks received per row."""
    placement = oneflow_accel.current_backend().placement()
    received, rows = 0, 4

    def counting(x: flow.Tensor, axis: int, sbp: flow.sbp.sbp) -> flow.Tensor:
        nonlocal received
        moved = original(x, axis, sbp)
        # What the rank holds after the change and did not hold before, by number of the element.
        numbers = np.arange(int(np.prod(x.shape)), dtype=np.float64).reshape(tuple(x.shape))
        whole = flow.tensor(numbers, placement=x.placement, sbp=flow.sbp.broadcast)
        before, after = (
            set(whole.to_global(sbp=list(each.sbp)).to_local().numpy().ravel().tolist())
            for each in (x, moved)
        )
        received += len(after - before)
        return moved

    original = parallel.relayout
    found = []
    for width, out, nblocks, split_input, split_output in TRAFFIC:
        output = SPLIT if split_output else WHOLE
        layer = ParallelMonarchLinear(
            MonarchLinear(width, out, nblocks=nblocks), placement, 0, output
        )
        x = flow.ones(rows, width, placement=placement, sbp=flow.sbp.broadcast)
        x = x.to_global(sbp=flow.sbp.split(1) if split_input else flow.sbp.broadcast)
        received = 0
        parallel.relayout = counting
        try:
            layer(x)
        finally:
            parallel.relayout = original
        (total,) = distributed.all_reduce_sum([received])
        found.append(total / rows)
    return found


def state() -> dict[str, Any]:
    """Names and shapes, and whether the values and the matrix are those of the layer."""
    placement = oneflow_accel.current_backend().placement()
    width, hidden, nblocks = SIZES["padded"]
    layer = MonarchLinear(width, hidden, nblocks=nblocks)
    split = ParallelMonarchLinear(layer, placement, 0, SPLIT)
    values = {name: agree.whole(v, to=None).numpy() for name, v in split.state_dict().items()}
    return {
        "shapes": {name: list(value.shape) for name, value in values.items()},
        "same": all((values[n] == v.numpy()).all() for n, v in layer.state_dict().items()),
        "held": int(split.blkdiag1.to_local().numel()) / layer.blkdiag1.numel(),
        "matrix": float(
            abs(agree.whole(split.dense(), to=None).numpy() - layer.dense().numpy()).max()
        ),
    }


def refused() -> str:
    placement = oneflow_accel.current_backend().placement()
    try:
        ParallelMonarchLinear(MonarchLinear(6, 6, nblocks=3), placement)
    except UserError as error:
        return str(error)
    return ""


CHECKS: dict[str, Callable[[], Any]] = {
    "gradients": gradients,
    "gradients, 2 x 2": lambda: gradients(data_parallel=True),
    "traffic": traffic,
    "state": state,
    "refused": refused,
}


def main() -> None:
    oneflow_accel.select_device()
    path = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for name in json.loads(path.read_text()):
        try:
            results[name] = CHECKS[name]()
        except Exception:
            results[name] = traceback.format_exc()[-3000:]
        if distributed.is_main():
            path.with_suffix(".out").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
