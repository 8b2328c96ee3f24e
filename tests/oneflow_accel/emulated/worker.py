"""What a program sees of an emulated device: one function per process of test_emulated.py."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oneflow_accel

import numpy as np
import oneflow as flow
from oneflow import nn

MIB = 2**20


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def step(optimizer: type, **options: Any) -> Callable[[str], flow.Tensor]:
    """Three steps, with clipped gradients."""

    def run(device: str) -> flow.Tensor:
        weight = nn.Parameter(flow.tensor(array(6, 4)).to(device))
        group = {"params": [weight], "clip_grad_max_norm": 1.0, "clip_grad_norm_type": 2.0}
        update = optimizer([group], lr=0.1, **options)
        for _ in range(3):
            (weight * weight).sum().backward()
            update.clip_grad()
            update.step()
            update.zero_grad()
        return weight

    return run


def lstm(device: str) -> flow.Tensor:
    return nn.LSTM(6, 5).to(device)(flow.tensor(array(1, 4, 6)).to(device))[0]


def assigned(device: str) -> flow.Tensor:
    x = flow.tensor(array(4, 6)).to(device)
    x[1:3, ::2] = 7.0
    return x


def _x(device: str) -> flow.Tensor:
    return flow.tensor(array(4, 6)).to(device)


# Of all kinds: random numbers, shapes that depend on values, views, states, other types.
CASES: dict[str, Callable[[str], flow.Tensor]] = {
    "rand of global tensors": lambda d: flow.rand(
        3, 4, placement=flow.placement.all(d), sbp=flow.sbp.broadcast
    ).to_local(),
    "randn": lambda d: flow.randn(3, 4, device=d),
    "randperm": lambda d: flow.randperm(10, device=d),
    "dropout": lambda d: nn.Dropout(0.5)(_x(d)),
    "normal_": lambda d: nn.init.normal_(flow.empty(3, 4, device=d)),
    "multinomial": lambda d: flow.multinomial(_x(d).abs(), 2),
    "topk": lambda d: flow.topk(_x(d), 2)[0],
    "sort": lambda d: flow.sort(_x(d))[1],
    "argwhere": lambda d: flow.argwhere(_x(d) > 0),
    "masked_select": lambda d: flow.masked_select(_x(d), _x(d) > 0),
    "einsum": lambda d: flow.einsum("ij,kj->ik", _x(d), _x(d)),
    "permute": lambda d: _x(d).reshape(2, 2, 6).permute(2, 0, 1).contiguous(),
    "assigned": assigned,
    "cumsum": lambda d: flow.cumsum(_x(d), 1),
    "softmax": lambda d: flow.softmax(_x(d), 1),
    "layer_norm": lambda d: nn.LayerNorm(6).to(d)(_x(d)),
    "conv": lambda d: nn.Conv2d(3, 4, 3).to(d)(flow.tensor(array(2, 3, 9, 9)).to(d)),
    "lstm": lstm,
    "bfloat16": lambda d: _x(d).to(flow.bfloat16).float(),
    "sgd": step(flow.optim.SGD, momentum=0.9),
    "adamw": step(flow.optim.AdamW),
    "lamb": step(flow.optim.LAMB),
}


class Block(nn.Module):
    """A layer of a transformer, with dropout."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(size), nn.Dropout(0.1)
        self.key, self.value = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        y = self.norm(x)
        weights = self.drop(flow.softmax(y @ self.key(y).transpose(1, 2), -1))
        return x + self.drop(nn.functional.gelu(weights @ self.value(y)))


def train(device: str) -> tuple[list[float], list[bytes]]:
    """Losses and weights of 6 steps, whose shapes differ: what is queued and what a kernel keeps
    for the next launch meet."""
    flow.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 16), Block(16), Block(16), nn.Linear(16, 50)).to(device)
    group = {"params": list(model.parameters()), "clip_grad_max_norm": 1.0}
    optimizer = flow.optim.AdamW([{**group, "clip_grad_norm_type": 2.0}], lr=1e-2)
    losses = []
    for number in range(6):
        tokens = np.random.default_rng(number).integers(0, 50, (3, 9 + number % 3))
        x, y = (flow.tensor(part).to(device) for part in (tokens[:, :-1], tokens[:, 1:]))
        loss = nn.functional.cross_entropy(model(x).reshape(-1, 50), y.reshape(-1))
        loss.backward()
        optimizer.clip_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    weights = [parameter.numpy().tobytes() for parameter in model.parameters()]
    return [loss.item() for loss in losses], weights


def trained() -> list[bool]:
    """Whether each of many runs of training gives the CPU's bits."""
    expected = train("cpu")
    return [train("emulated") == expected for _ in range(8)]


def threads() -> int:
    """How many streams have threads of their own, when work is done on some."""
    flow.ones(4, device="emulated").numpy()
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return sum(name == "emulated stream" for name in names)


def seconds_of_copies() -> list[float]:
    """A copy of 8 MiB to the device, and of 4 bytes to the host."""
    x, seconds = flow.ones(2 * MIB), []
    for copy in (lambda: x.to("emulated"), lambda: flow.ones(1, device="emulated").item()):
        begin = time.monotonic()
        copy()
        oneflow_accel.current_backend().synchronize()
        seconds.append(time.monotonic() - begin)
    return seconds


def operators() -> dict[str, bool]:
    """Whether each gives the CPU's bits, by name."""
    equal = {}
    for name, run in CASES.items():
        results = []
        for device in ("cpu", "emulated"):
            flow.manual_seed(3)
            results.append(run(device).numpy())
        equal[name] = results[0].tobytes() == results[1].tobytes()
    return equal


def counted() -> dict[str, Any]:
    backend = oneflow_accel.current_backend()
    backend.reset_peak_memory_stats()
    before = backend.counters()
    x = flow.ones(4 * MIB, device="emulated")
    y = (x + x).numpy()
    flow.tensor(y).to("emulated:1")
    backend.synchronize()
    after = backend.counters()
    return {
        "sum": float(y.sum()),
        "made": {name: after[name] - before[name] for name in after},
        "uncovered": after["cpu_operators"] - after["operators"],
        "used": backend.memory_allocated(),
        "peak": backend.max_memory_allocated(),
        "devices": backend.device_count(),
        "name": backend.properties().name,
        "lacks": [f for f in ("host_memory", "memory_stats") if not backend.supports(f)],
    }


def out_of_memory() -> list[str]:
    """What is said, twice, and that the program can go on; of 64 MiB."""
    said = []
    x = flow.zeros(4, device="emulated")
    for _ in range(2):
        try:
            (flow.zeros(64 * MIB, device="emulated") + 1).sum().numpy()
        except RuntimeError as error:
            said.append(str(error))
        oneflow_accel.current_backend().empty_cache()
    said.append(str((x + 1).sum().item()))
    return said


def kept_weights() -> bool:
    """Weights that are copied to the device while copies of the old ones are kept: the new ones
    count."""
    from oneflow_accel import inference

    x = flow.tensor(array(3, 8)).to("emulated")
    model = inference.prepare(nn.Linear(8, 8).to("emulated").eval())
    with flow.no_grad():
        model(x).numpy()
        for parameter in model.parameters():
            parameter.copy_(flow.zeros(*parameter.shape))
        return bool((model(x).numpy() == 0).all())


def ddp() -> float:
    """A step's loss, by one process, which has nobody to send parameters to."""
    flow.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("emulated")
    ours = nn.parallel.DistributedDataParallel(
        net, broadcast_buffers=False, broadcast_parameters=False
    )
    loss = flow.relu(ours(flow.tensor(array(6, 4)).to("emulated"))).sum()
    loss.backward()
    return float(loss.item())


def refused() -> list[str]:
    """What a device with a Cambricon card's operators says of others, and of other types."""
    x, said = flow.tensor(array(3, 4)).to("emulated"), []
    # Its operators, on its types.
    flow.nn.functional.gelu(x @ x[0]).sum().item()
    for call in (lambda: flow.exp(x), lambda: x.to(flow.float64) + 1, lambda: flow.triu(x)):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    backend = oneflow_accel.current_backend()
    said.append(backend.supports("graph_adamw").reason)
    said.append(backend.properties().name)
    return said


def touch() -> None:
    flow.ones(4, device="emulated").numpy()
    maps = Path("/proc/self/maps").read_text().splitlines()
    line = next(line for line in maps if "oneflow_accel_emulated" in line and " ---s " in line)
    ctypes.string_at(int(line.partition("-")[0], 16), 1)


if __name__ == "__main__":
    oneflow_accel.select_device("emulated")
    print("found", json.dumps(globals()[sys.argv[1]]()), flush=True)
