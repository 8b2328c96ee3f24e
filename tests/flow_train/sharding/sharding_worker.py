"""Trains small models, cut over the processes and not, and compares them; started by
test_sharding.py.

Each process trains the uncut model on the whole batch, or replicated where batch norm looks at a
process's own images, and then the cut one on its share. Rank 0 writes JSON to the file of the
argument: by case the largest relative differences of losses, gradient norms and weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.collectives import Mesh

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train.sharding import Sharding, fully_shard
from flow_train.steps.eager import data_parallel
from monarch_flow.models import create_model

STEPS, BATCH, CLIP = 3, 8, 0.5
VIT = {"num_classes": 10, "img_size": 16, "patch_size": 8, "depth": 2, "num_heads": 2}
VIT |= {"embed_dim": 30}
TOKENS = ("plain", "shared", "tied", "frozen", "twice", "views", "arguments", "hooks", "buffers")


class SmallResNet(nn.Module):
    """Convolutions with batch norm in blocks; 5 channels divide by no number of processes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, bias=False)
        block = lambda: nn.Sequential(nn.Conv2d(5, 5, 3, bias=False), nn.BatchNorm2d(5))  # noqa: E731
        self.layers = nn.Sequential(nn.Sequential(block(), nn.ReLU()), nn.Sequential(block()))
        self.head = nn.Linear(5, 10)

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.head(self.layers(self.stem(x)).mean(dim=(2, 3)))


class Tokens(nn.Module):
    """Blocks on tokens (N, 12, 16); `kind` says what is uncommon in them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([TokenBlock(kind) for _ in range(3)])
        self.head = nn.Linear(16, 10)
        if kind == "shared":
            self.blocks[1].inner = self.blocks[0].inner
            self.blocks[2].last.weight = self.blocks[2].inner[0].weight
        if kind == "tied":
            self.again = nn.Linear(16, 16)
            self.again.weight = self.blocks[2].inner[0].weight
            self.blocks[1].last.weight = self.blocks[1].inner[0].weight
        if kind == "frozen":
            for value in [*self.blocks[0].parameters(), self.blocks[1].inner[0].weight]:
                value.requires_grad_(False)

    def forward(self, images: flow.Tensor) -> flow.Tensor:
        x = images.reshape(len(images), 12, 4, 16).mean(dim=2)
        gate = self.head.weight.mean(dim=0)
        for number in {"twice": (0, 0, 2, 0)}.get(self.kind, (0, 1, 2)):
            named = {"gate": gate, "more": [(x,)]} if self.kind == "arguments" else {}
            # The second part of a chunk begins elsewhere than its memory.
            parts = x.chunk(2) if self.kind == "views" else [x]
            x = flow.cat([self.blocks[number](part, **named) for part in parts])
        return self.head((self.again(x) if self.kind == "tied" else x).mean(dim=1))


class TokenBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.unused = nn.Parameter(flow.zeros(3))
        self.weight = nn.Parameter(flow.randn(2, 16, 8) / 4)
        self.last = nn.Linear(16, 16)
        if kind == "hooks":
            self.inner[0].register_forward_hook(lambda module, inputs, out: out * 1.5)
            self.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
            self.register_forward_hook(lambda module, inputs, out: out + inputs[0])
        if kind == "buffers":
            # One that training changes, and one of no checkpoint.
            self.register_buffer("scale", flow.full((16,), 0.7))
            self.register_buffer("shift", flow.full((16,), 0.1), persistent=False)

    def forward(self, x: flow.Tensor, gate: Any = None, more: Any = ()) -> flow.Tensor:
        # Views of a weight, and of the input.
        left, right = self.weight.chunk(2, dim=0)
        y = flow.cat([x.transpose(1, 2).transpose(1, 2) @ left[0], x @ right[0]], dim=-1)
        if self.kind == "hooks" and y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        y = self.last(self.inner(y).reshape(-1, 16)).reshape(*x.shape)
        if self.kind == "buffers":
            y = y * self.scale + self.shift
            if self.training:
                with flow.no_grad():
                    self.scale.mul_(0.9)
        return x + y if gate is None else x + y * gate + more[0][0]


def make(kind: str) -> nn.Module:
    flow.manual_seed(0)
    if kind in TOKENS:
        return Tokens(kind)
    if kind.startswith("resnet"):
        model = SmallResNet()
        for module in model.modules():
            if kind == "resnet, mixed":
                # Blocks in eval mode whose norms are not, and the other way round.
                is_norm = isinstance(module, nn.BatchNorm2d)
                module.training = is_norm == (module in model.layers[0].modules())
                for name, value in module.named_buffers(recurse=False):
                    value.fill_({"running_mean": 0.1, "running_var": 0.3}.get(name, 0))
        return model
    more = {"monarch": {"mlp_cfg": "monarch"}, "dropout": {"drop_rate": 0.3}}.get(kind, {})
    return create_model("vit_small_patch16_224", **VIT, **more)


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        yield (
            draw.standard_normal((BATCH, 3, 16, 16)).astype(np.float32),
            draw.integers(0, 10, BATCH),
        )


def train(
    kind: str,
    options: dict[str, Any] | None,
    *,
    accumulate: int = 1,
    bfloat16: bool = False,
    reduce_dtype: str = "float32",
) -> dict[str, Any]:
    """Losses, gradient norms and the weights afterwards; `options` None leaves the model whole."""
    world, rank = distributed.world_size(), distributed.rank()
    model, sharding = make(kind), None
    shares = kind.startswith("resnet") or options is not None
    forward = model
    if options is not None:
        given = dict(options)
        mesh = Mesh.of(given.pop("rows", None))
        no_sync = given.pop("no_sync", False)
        sharding = fully_shard(model, mesh=mesh, **given)
    elif shares:
        forward = data_parallel(model, reduce_dtype)
    # The gradient of attention's key biases is zero but for rounding, which a smaller eps blows up.
    eps = 1e-3 if bfloat16 else 1e-6
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=eps)
    losses, norms = [], []
    for step, (images, labels) in enumerate(batches()):
        if shares:
            images, labels = images[rank::world], labels[rank::world]
        total = 0.0
        for part in range(accumulate):
            flow.manual_seed(100 * step + 10 * part + rank)
            mine = slice(part, None, accumulate)
            with flow.autocast("cpu", flow.bfloat16, enabled=bfloat16):
                scores = forward(flow.tensor(images[mine])).float()
            loss = nn.functional.cross_entropy(scores, flow.tensor(labels[mine])) / accumulate
            if sharding is not None and no_sync and part < accumulate - 1:
                with sharding.no_sync():
                    loss.backward()
            else:
                loss.backward()
            total += float(loss.numpy())
        losses.append(distributed.all_reduce_sum([total])[0] / world)
        norms.append(_clip(model, sharding))
        gradients = _gradients(model, sharding)
        optimizer.step()
        optimizer.zero_grad()
    whole = _arrays(sharding.named_weights() if sharding else model.named_parameters())
    model.eval()
    with flow.no_grad():
        scores = model(flow.tensor(next(batches())[0])).numpy()
    buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    found = {"losses": losses, "norms": norms, "scores": scores, "gradients": gradients}
    return {**found, **whole, **buffers}


def _arrays(named: Iterable[tuple[str, flow.Tensor]]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in named}


def _gradients(model: nn.Module, sharding: Sharding | None) -> np.ndarray:
    """Flat, one after the other by name, zeros for a parameter that has none."""
    weights, gradients = model.named_parameters(), model.named_parameters()
    named = ((name, value.grad) for name, value in gradients if value.grad is not None)
    if sharding is not None:
        weights, named = sharding.named_weights(), sharding.named_gradients()
    arrays = {name: np.zeros(value.shape) for name, value in weights} | _arrays(named)
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def _clip(model: nn.Module, sharding: Sharding | None) -> float:
    if sharding is not None:
        return float(sharding.clip(CLIP).numpy().item())
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    norm = float(sum((g * g).sum() for g in gradients).sqrt().numpy())
    for gradient in gradients:
        gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
    return norm


def difference(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest of each kind, relative to the largest value."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    result = {"weights": 0.0}
    for name, value in expected.items():
        value = np.asarray(value, np.float64)
        gap = float(abs(np.asarray(found[name], np.float64) - value).max() / abs(value).max())
        kind = name if name in ("losses", "norms") else "weights"
        result[kind] = max(result.get(kind, 0.0), gap)
    return result


def main(path: Path) -> None:
    cases = json.loads(path.read_text())
    whole: dict[tuple[str, int, bool], dict[str, Any]] = {}
    results = {}
    for name, case in cases.items():
        kind, accumulate = case.pop("kind", "vit"), case.pop("accumulate", 1)
        bfloat16 = case.pop("bfloat16", False)
        settings = {"accumulate": accumulate, "bfloat16": bfloat16}
        if (kind, accumulate, bfloat16) not in whole:
            # Units seed their own dropout.
            plain = {"recompute": False} if kind == "dropout" else None
            whole[kind, accumulate, bfloat16] = train(kind, plain, **settings)
        if "reduce_dtype" in case:
            found = train(kind, None, **settings, **case)
        else:
            found = train(kind, case, **settings)
        results[name] = difference(found, whole[kind, accumulate, bfloat16])
    if distributed.is_main():
        path.with_suffix(".out").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
