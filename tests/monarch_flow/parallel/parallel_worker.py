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

STEPS, ROWS = 20, 16
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


class Mlp(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2 = first, second

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.fc2(flow._C.gelu(self.fc1(x)))


def local_mlp(sizes: str) -> Mlp:
    """The same numbers on every process and at every call."""
    width, hidden, nblocks = SIZES[sizes]
    flow.manual_seed(3)
    return Mlp(
        MonarchLinear(width, hidden, nblocks=nblocks), MonarchLinear(hidden, width, nblocks=nblocks)
    )


def parallel_mlp(sizes: str, placement: flow.placement, axis: int | None) -> Mlp:
    local = local_mlp(sizes)
    return Mlp(
        ParallelMonarchLinear(local.fc1, placement, axis, SPLIT),
        ParallelMonarchLinear(local.fc2, placement, axis, WHOLE),
    )


def batches(sizes: str) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    width = SIZES[sizes][0]
    inputs = rng.standard_normal((2, ROWS, width)).astype(np.float32)
    return [(x, np.tanh(np.roll(x, 3, axis=1) * 2)) for x in inputs] * (STEPS // 2)


def squared_error(y: flow.Tensor, wanted: flow.Tensor) -> flow.Tensor:
    return ((y - wanted) * (y - wanted)).mean()


class TrainGraph(nn.Graph):
    def __init__(self, model: nn.Module, optimizer: flow.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: flow.Tensor, wanted: flow.Tensor) -> flow.Tensor:
        loss = squared_error(self.model(x), wanted)
        loss.backward()
        return loss


def train(
    model: nn.Module, sizes: str, place: Callable[[np.ndarray], flow.Tensor], graph: bool = False
) -> list[float]:
    optimizer = flow.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    compiled = TrainGraph(model, optimizer) if graph else None
    KEPT.append(compiled)
    losses = []
    for x, wanted in batches(sizes):
        if compiled is not None:
            loss = compiled(place(x), place(wanted))
        else:
            loss = squared_error(model(place(x)), place(wanted))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(agree.whole(loss, to=None).numpy()))
    return losses


# Freeing a graph waits for the other processes.
KEPT: list[Any] = []


def placed(placement: flow.placement, sbp: list[Any]) -> Callable[[np.ndarray], flow.Tensor]:
    return lambda values: flow.tensor(values, placement=placement, sbp=sbp)


def tensor_parallel(sizes: str, graph: bool = False) -> list[list[float]]:
    """Losses of all processes together, and of one alone."""
    placement = oneflow_accel.current_backend().placement()
    model = parallel_mlp(sizes, placement, 0)
    found = train(model, sizes, placed(placement, [flow.sbp.broadcast]), graph)
    return [found, train(local_mlp(sizes), sizes, flow.tensor)]


def two_by_two(graph: bool = False) -> list[list[float]]:
    """Data parallel along the first axis, tensor parallel along the second."""
    placement = oneflow_accel.current_backend().placement([[0, 1], [2, 3]])
    model = parallel_mlp("even", placement, 1)
    place = placed(placement, [flow.sbp.split(0), flow.sbp.broadcast])
    return [train(model, "even", place, graph), train(local_mlp("even"), "even", flow.tensor)]


def data_parallel() -> list[list[float]]:
    """OneFlow's DistributedDataParallel on local layers; each process has a share of the rows."""
    rank, count = distributed.rank(), distributed.world_size()
    model = nn.parallel.DistributedDataParallel(local_mlp("even"))

    def share(values: np.ndarray) -> flow.Tensor:
        return flow.tensor(np.ascontiguousarray(values[rank::count]))

    own = train(model, "even", share)
    found = [total / count for total in distributed.all_reduce_sum(own)]
    return [found, train(local_mlp("even"), "even", flow.tensor)]


def gradients() -> dict[str, float]:
    """Largest difference to one process's gradients over their largest, for each layout."""
    placement = oneflow_accel.current_backend().placement()
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
                split = ParallelMonarchLinear(copy.deepcopy(layer), placement, 0, output)
                given = flow.tensor(x, placement=placement, sbp=flow.sbp.broadcast)
                weights = flow.tensor(slope, placement=placement, sbp=flow.sbp.broadcast)
                actual = _gradients(split, given.to_global(sbp=source).detach(), weights)
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
    layer = local_mlp("padded").fc1
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
    "eager": lambda: tensor_parallel("even"),
    "eager, padded": lambda: tensor_parallel("padded"),
    "eager, uneven": lambda: tensor_parallel("uneven"),
    "graph": lambda: tensor_parallel("even", graph=True),
    "graph, padded": lambda: tensor_parallel("padded", graph=True),
    "2 x 2": two_by_two,
    "graph, 2 x 2": lambda: two_by_two(graph=True),
    "DDP": data_parallel,
    "gradients": gradients,
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
