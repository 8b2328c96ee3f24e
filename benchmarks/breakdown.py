"""Where the time of a training step goes, by kind of module:

    python -m benchmarks.breakdown ViTAE_basic_Tiny --batch 8 --size 224 --beside mlp_cfg=monarch
    python -m benchmarks.breakdown vit_small_patch16_224 mlp_cfg=monarch --batch 8

Each part of the model runs alone, forward and backward, on the input that it had in a forward pass
of the whole, and waits for the result. What a part's own parts take is not counted twice: "sums and
maps" of a cell is the cell without its branches. The step as a whole is measured besides; what is
in none of the parts is its row "rest", less than zero where the step runs parts side by side.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import oneflow_accel

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train import cli
from flow_train.compare.rows import markdown, timed
from flow_train.metrics.macs import macs_by_module
from monarch_flow.models import create_model
from monarch_flow.models.__main__ import read_arguments

# (kind, expression that the names of its modules match), the first that fits counts. Modules that
# are in none of them count as part of the nearest that is.
KINDS = (
    ("embedding at several dilations", r"\.RC\.PRM$"),
    ("convolutions of reduction cells", r"\.RC\.PCM$"),
    ("performer", r"\.RC\.attn(\..*)?$"),
    ("convolutions of normal cells", r"\.NC\.\d+\.PCM$"),
    ("embedding", r"(^|\.)patch_embed(\..*)?$"),
    ("attention", r"\.attn$"),
    ("MLP", r"\.mlp(_tokens|_channels)?$"),
    ("layer norm", r"(^|[._])norm\d?$"),
    ("sums and maps of cells", r"\.RC$|(^|\.)(NC|blocks)\.\d+$"),
    ("head", r"^head$"),
)
OPTIMIZER, REST, STEP = "optimizer", "rest", "whole step"


@dataclass
class Part:
    """A module that is measured by itself: its name in the model and its kind of KINDS, what its
    forward got, the name of the part around it ("" for none), MACs for one image without those of
    the parts in it, and the seconds of each round forward and backward, with the parts in it."""

    name: str
    kind: str
    module: nn.Module
    inputs: tuple[Any, ...] = ()
    around: str = ""
    macs: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A kind of module in one model: how many, MACs of one image, seconds of a step."""

    kind: str
    modules: int
    macs: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


class Breakdown:
    """Measures one model, in training mode, on images (N, C, H, W)."""

    def __init__(
        self, model: nn.Module, images: flow.Tensor, synchronize: Callable[[], Any]
    ) -> None:
        self.model, self.images = model, images
        self._timed = partial(timed, synchronize=synchronize)
        self.labels = flow.zeros(images.shape[0], dtype=flow.int64)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = flow.optim.AdamW(trained, lr=1e-5)
        self.parts = _parts(model, images)
        self.macs = 0
        for module in macs_by_module(model, tuple(images.shape[2:]), images.shape[1]):
            self.macs += module.macs
            part = self.parts.get(_around(module.name + ".", self.parts))
            if part is not None:
                part.macs += module.macs
        self.steps: list[tuple[float, float, float]] = []

    def round(self) -> None:
        """Measure the step and every part once."""
        self.steps.append(self._step())
        for part in self.parts.values():
            part.seconds.append(self._alone(part))

    def forget(self) -> None:
        """Drop what was measured, as after a round that warms up."""
        self.steps.clear()
        for part in self.parts.values():
            part.seconds.clear()

    def rows(self) -> list[Row]:
        """By kind, in the order of KINDS, then what is in none of them, and the whole step; medians
        over the rounds."""
        own = {name: np.median(part.seconds, axis=0) for name, part in self.parts.items()}
        for part in self.parts.values():
            if part.around:
                own[part.around] = own[part.around] - np.median(part.seconds, axis=0)
        found = []
        for kind, _ in KINDS:
            names = [name for name, part in self.parts.items() if part.kind == kind]
            if names:
                forward, backward = sum(own[name] for name in names)
                macs = sum(self.parts[name].macs for name in names)
                found.append(Row(kind, len(names), macs, float(forward), float(backward)))
        forward, backward, update = map(float, np.median(self.steps, axis=0))
        found.append(Row(OPTIMIZER, 1, 0, 0.0, update))
        whole = Row(STEP, 1, self.macs, forward, backward + update)
        rest = Row(
            REST,
            0,
            self.macs - sum(row.macs for row in found),
            forward - sum(row.forward for row in found),
            whole.backward - sum(row.backward for row in found),
        )
        return [*found, rest, whole]

    def _step(self) -> tuple[float, float, float]:
        """Seconds of the forward pass, the backward pass, and the update."""
        loss, forward = self._timed(
            lambda: nn.functional.cross_entropy(self.model(self.images), self.labels)
        )
        _, backward = self._timed(loss.backward)
        _, update = self._timed(self._update)
        return forward, backward, update

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _alone(self, part: Part) -> tuple[float, float]:
        """Seconds of forward and backward; gradients are left as they were: none."""
        out, forward = self._timed(lambda: part.module(*part.inputs))
        gradient = flow.ones_like(out.detach())
        _, backward = self._timed(lambda: out.backward(gradient))
        inputs = [value for value in part.inputs if isinstance(value, flow.Tensor)]
        for tensor in (*inputs, *part.module.parameters()):
            tensor.grad = None
        return forward, backward


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), None)


def _around(name: str, parts: dict[str, Part]) -> str:
    """The innermost part that a module's name lies in; "" for none."""
    holding = [part for part in parts if name.startswith(part + ".")]
    return max(holding, key=len, default="")


def _parts(model: nn.Module, images: flow.Tensor) -> dict[str, Part]:
    """The modules of a kind that a forward pass calls, with their inputs."""
    chosen: dict[str, Part] = {}
    for name, module in model.named_modules():
        kind = _kind(name)
        # Inside of a part of the same kind there is nothing to tell apart, as in a performer.
        around = chosen.get(_around(name, chosen))
        if kind is not None and (around is None or around.kind != kind):
            chosen[name] = Part(name, kind, module)
    key = object()
    for part in chosen.values():
        part.module._forward_hooks[key] = partial(_record, part)
    try:
        model(images)
    finally:
        for part in chosen.values():
            del part.module._forward_hooks[key]
    called = {name: part for name, part in chosen.items() if part.inputs}
    for name, part in called.items():
        part.around = _around(name, called)
    return called


def _record(part: Part, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    part.inputs = tuple(_leaf(value) for value in inputs)


def _leaf(value: Any) -> Any:
    """The same values, with a gradient of their own where they had one."""
    if not isinstance(value, flow.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def table(found: Sequence[tuple[str, Sequence[Row]]], batch: int) -> str:
    """Markdown: a line for each kind; for each model MACs of an image, milliseconds forward and
    backward, and its share of the step; with two models, how many times the second's speed."""
    lines = [["kind"]]
    for title, _ in found:
        lines[0] += [f"{title}: MMACs", "forward ms", "backward ms", "share"]
    if len(found) == 2:
        lines[0].append("speed-up")
    for kind in dict.fromkeys(row.kind for _, rows in found for row in rows):
        cells, seconds = [kind], []
        for _, rows in found:
            row = next((row for row in rows if row.kind == kind), Row(kind, 0, 0, 0.0, 0.0))
            if row.modules > 1:
                cells[0] = f"{kind} ({row.modules})"
            share = row.seconds / rows[-1].seconds
            cells += [f"{row.macs / 1e6:.1f}" if row.macs else ""]
            cells += [f"{1e3 * row.forward:.1f}", f"{1e3 * row.backward:.1f}", f"{share:.1%}"]
            seconds.append(row.seconds)
        if len(found) == 2:
            sensible = kind != REST and seconds[1] > 0
            cells.append(f"{seconds[0] / seconds[1]:.2f}" if sensible else "")
        lines.append(cells)
    speeds = [f"\n{title}: {batch / rows[-1].seconds:.1f} images/s" for title, rows in found]
    return "\n".join([markdown(lines), *speeds])


def _models(options: argparse.Namespace) -> Iterator[tuple[str, nn.Module]]:
    pairs = [options.arguments]
    if options.beside is not None:
        pairs.append([*options.arguments, *options.beside])
    for arguments in pairs:
        model = create_model(options.model, **read_arguments(arguments))
        yield " ".join([options.model, *arguments]), model.train()


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run("breakdown", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(prog="python -m benchmarks.breakdown", description=__doc__)
    parser.add_argument("model", help="a model of monarch_flow")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="arguments of the model")
    parser.add_argument(
        "--beside",
        nargs="+",
        metavar="key=value",
        help="a second model with these arguments besides, measured in turn with the first",
    )
    parser.add_argument("--batch", type=int, default=8, help="images of a step (default: 8)")
    parser.add_argument("--size", type=int, help="side of an image (default: the model's)")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (default: 5)")
    options = parser.parse_args(argv)
    backend = oneflow_accel.select_device()
    backend.manual_seed(0)
    measured = []
    for title, model in _models(options):
        height, width = (options.size,) * 2 if options.size else model.img_size
        images = flow.randn(options.batch, getattr(model, "in_chans", 3), height, width)
        measured.append((title, Breakdown(model, images, backend.synchronize)))
    # The first round warms up.
    for number in range(options.rounds + 1):
        for _, breakdown in measured:
            breakdown.round()
            if number == 0:
                breakdown.forget()
    print(table([(title, breakdown.rows()) for title, breakdown in measured], options.batch))


if __name__ == "__main__":
    sys.exit(main())
