"""Training steps beside other work, against stock OneFlow: what a kernel's threads do while they
wait shows where they are not alone.

    python -m benchmarks.contention
    python -m benchmarks.contention --also GOMP_SPINCOUNT=300000

Seven minutes; the table is Markdown. Busy processes compute without an end. A quota is a control
group's; where none can be made, its rows are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from oneflow_accel import machine, settings
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
from oneflow import nn

from flow_train import cli
from flow_train.compare.process import asking
from flow_train.compare.rows import line, timed

WARM_UP = 2
# Processes beside a step, and cores that it may use; None: all.
CONDITIONS = {
    "alone": (0, None),
    "beside 1 busy process": (1, None),
    "beside 4 busy processes": (4, None),
    "with half a core": (0, 0.5),
    "with 1.5 cores": (0, 1.5),
}
_PERIOD = 100_000
# By transformers' names, as in items.LLAMA.
_LLAMA = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 688}
_LLAMA |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
_LLAMA |= {"max_position_embeddings": 256}
Step = Callable[[], None]


def _trained(model: nn.Module, loss: Callable[[], flow.Tensor]) -> Step:
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        value.item()

    return step


def _resnet() -> Step:
    from flowvision.models import resnet18

    model = resnet18()
    x, labels = flow.randn(20, 3, 32, 32), flow.arange(20)
    return _trained(model, lambda: nn.functional.cross_entropy(model(x), labels))


def _llama() -> Step:
    from libai.utils import distributed as dist

    from benchmarks.ours import generation

    generation.LLAMA.update(_LLAMA)
    dist.setup_dist_util(generation.OmegaConf.create(generation._ONE_PROCESS))
    return generation.llama_train(4, 128)


def _gan() -> Step:
    def layers(*widths: int) -> nn.Module:
        made: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            made += [nn.LeakyReLU(0.2), nn.Linear(before, after)]
        return nn.Sequential(*made[1:])

    generator, judge = layers(64, 256, 512, 784), layers(784, 512, 256, 1)
    images, judged = flow.randn(64, 784), nn.BCEWithLogitsLoss()
    real, fake = flow.ones(64, 1), flow.zeros(64, 1)

    def made() -> flow.Tensor:
        return generator(flow.randn(64, 64)).tanh()

    judging = _trained(judge, lambda: judged(judge(images), real) + judged(judge(made()), fake))
    making = _trained(generator, lambda: judged(judge(made()), real))

    def step() -> None:
        judging()
        making()

    return step


class _Images(flow.utils.data.Dataset):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> flow.Tensor:
        image = np.random.default_rng(index).standard_normal((3, 64, 64)).astype(np.float32)
        return (flow.tensor(image) * 0.5).clamp(-1, 1)


def _loader() -> Step:
    images = iter(flow.utils.data.DataLoader(_Images(), batch_size=16, num_workers=2))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2))
    return _trained(model, lambda: model(next(images)).square().mean())


PROGRAMS = {
    "ResNet18, 32 x 32, b20": _resnet,
    "Llama, 4 layers of 256, 4 x 128 tokens": _llama,
    "GAN of linear layers, b64": _gan,
    "DataLoader, 2 workers, 2 convolutions, b16": _loader,
}


def measure(program: str, seconds: float) -> float:
    """Median seconds of a step in this process."""
    step, found = PROGRAMS[program](), []
    until = time.perf_counter() + seconds
    while len(found) < WARM_UP + 3 or time.perf_counter() < until:
        # A step of LiBai's waits for nothing.
        found.append(timed(step, flow._oneflow_internal.eager.Sync)[1])
        if len(found) == WARM_UP:
            until = time.perf_counter() + seconds
    return statistics.median(found[WARM_UP:])


@contextlib.contextmanager
def _quota(cores: float | None) -> Iterator[Path | None]:
    """A control group of so many cores; None where that cannot be made, or all may be used."""
    made = None
    if cores is not None:
        for group in machine.groups("cpu"):
            with contextlib.suppress(OSError):
                folder = group / f"oneflow_accel_{os.getpid()}"
                folder.mkdir()
                made = folder
                # Microseconds.
                quota = int(cores * _PERIOD)
                if (folder / "cpu.cfs_quota_us").exists():
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
                else:
                    (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
                break
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()


def run(program: str, condition: str, environment: dict[str, str], seconds: float) -> float:
    """Median seconds of a step in a process of its own."""
    beside, cores = CONDITIONS[condition]
    spin = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_quota(cores))
        busy = [subprocess.Popen(spin) for _ in range(beside)]
        for process in busy:
            stack.callback(process.wait)
            stack.callback(process.kill)
        ended = subprocess.run(
            asking(measure, program, seconds),
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: group and (group / "cgroup.procs").write_text("0"),
            timeout=600,
        )
    if ended.returncode != 0:
        raise UserError(f"{program}, {condition}: ended with {ended.returncode}")
    return json.loads(ended.stdout.splitlines()[-1])


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and sign for name, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE[,NAME=VALUE...]")
    return {name: value for name, _, value in pairs}


def _main() -> None:
    parser = cli.Parser(prog="python -m benchmarks.contention", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each (default: %(default)s)")
    text = "one more column: these environment variables"
    parser.add_argument(
        "--also", type=_pairs, action="append", default=[], metavar="NAME=VALUE[,...]", help=text
    )
    parser.add_argument("--only", default="", help="programs or conditions with this in the name")
    options = parser.parse_args()
    sides = {"stock OneFlow": {settings.PLUGIN.name: "off"}, "this": {}}
    sides |= {",".join(map("=".join, each.items())): each for each in options.also}
    with _quota(1) as group:
        conditions = [name for name, (_, cores) in CONDITIONS.items() if group or cores is None]
    print(f"Milliseconds of a step, {machine.cores()} cores, {date.today()}\n")
    heads = ["step", "condition", *sides, "stock / this"]
    print(line(heads), line(["---"] * len(heads)), sep="\n")
    for program in PROGRAMS:
        for condition in conditions:
            if options.only not in f"{program} {condition}":
                continue
            found = [run(program, condition, each, options.seconds) for each in sides.values()]
            texts = [f"{1000 * seconds:.1f}" for seconds in found]
            print(line([program, condition, *texts, f"{found[0] / found[1]:.2f}"]), flush=True)


if __name__ == "__main__":
    sys.exit(cli.run("contention", _main))
