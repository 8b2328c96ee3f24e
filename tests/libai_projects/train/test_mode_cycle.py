"""A run goes on in every mode (eager or nn.Graph, processes, layouts) from what another mode wrote.

It is handed on from mode to mode, two steps each, and equals one that nobody interrupted: losses,
weights and moments. With ALL=1 every mode goes on from the checkpoints of all others.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flow_train.checkpoint.folders import read_checkpoint
from libai_projects.weights import old_runs
from tests.launch import REPOSITORY, run_distributed, run_process
from tests.libai_projects.train.conftest import CONFIG, NO_DROPOUT, PROJECTS, TINY, losses
from tests.modes import ALL

WORKER = Path(__file__).with_name("cycle_worker.py")
# Written by commit 2533e52, eagerly and under nn.Graph, after two steps: LiBai's own form.
OLD = REPOSITORY / "tests" / "data" / "libai_checkpoints"
STEPS = 2
# Of a machine on which much else runs; all alone it takes a fifth of it.
pytestmark = pytest.mark.timeout(900)
BASE = (
    *TINY,
    *NO_DROPOUT,
    "optim.lr=1e-3",
    # A schedule that does not depend on the length of the run.
    "train.scheduler.gamma=0.95",
    "train.evaluation.enabled=false",
    "train.train_micro_batch_size=null",
    "train.global_batch_size=8",
    f"train.checkpointer.period={STEPS}",
    "train.checkpointer.max_to_keep=100",
)
GRAPH = ("graph.enabled=true",)
TENSOR = ("train.dist.tensor_parallel_size=2",)
PIPELINE = ("train.dist.pipeline_parallel_size=2",)
# Micro batches, on which the stages of a graph overlap.
MICRO = ("train.num_accumulation_steps=2",)


def zero(stage: int) -> tuple[str, ...]:
    return (
        *GRAPH,
        "train.zero_optimization.enabled=true",
        f"train.zero_optimization.stage={stage}",
    )


@dataclass(frozen=True)
class Mode:
    name: str
    processes: int
    options: tuple[str, ...] = ()


# In the order in which they go on; processes that are not tensor or pipeline parallel are data
# parallel.
ALL_MODES = (
    Mode("eager", 1),
    Mode("graph", 1, GRAPH),
    Mode("eager-data", 2),
    Mode("graph-pipeline", 2, (*GRAPH, *PIPELINE, *MICRO)),
    Mode("eager-tensor", 2, TENSOR),
    Mode("graph-data", 2, GRAPH),
    Mode("eager-pipeline", 2, PIPELINE),
    Mode("graph-ZeRO2", 2, zero(2)),
    Mode("graph-tensor", 2, (*GRAPH, *TENSOR)),
    Mode("eager-tensor-pipeline", 4, (*TENSOR, *PIPELINE)),
    Mode("graph-ZeRO1-data-tensor", 4, (*zero(1), *TENSOR)),
    Mode("eager-data-pipeline", 4, PIPELINE),
    Mode("graph-tensor-pipeline", 4, (*GRAPH, *TENSOR, *PIPELINE)),
)
# What these show others do as well.
LEFT_OUT = ("eager-data", "graph-data", "graph-ZeRO1-data-tensor", "eager-data-pipeline")
LEFT_OUT += ("eager-pipeline", "graph-tensor", "eager-tensor")
MODES = tuple(mode for mode in ALL_MODES if ALL or mode.name not in LEFT_OUT)


@dataclass(frozen=True)
class Job:
    """A run, from its folder's last checkpoint on where there is one, up to a step."""

    mode: Mode
    out: Path
    last_step: int


def run(jobs: Sequence[Job], environment: dict[str, str], options: Sequence[str] = BASE) -> None:
    while jobs:
        processes = jobs[0].mode.processes
        count = next(
            (i for i, job in enumerate(jobs) if job.mode.processes != processes), len(jobs)
        )
        lists = [
            [
                *("--config-file", str(PROJECTS / CONFIG), *options, *job.mode.options),
                *("--resume", f"train.output_dir={job.out}", f"train.train_iter={job.last_step}"),
            ]
            for job in jobs[:count]
        ]
        timeout = 60 + 30 * count
        if processes == 1:
            result = run_process([WORKER, json.dumps(lists)], timeout=timeout, env=environment)
        else:
            result = run_distributed(
                [WORKER, json.dumps(lists)],
                processes,
                timeout=timeout,
                env=environment,
                cwd=jobs[0].out.parent,
            )
        error = max(result.stdout.find("user error"), 0)
        assert result.returncode == 0, result.stdout[error:][-30000:]
        jobs = jobs[count:]


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def taken_up(source: Path, target: Path) -> Path:
    shutil.copytree(source, target / source.relative_to(source.parents[1]))
    return target


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Weights and moments of a checkpoint, and the number of steps."""
    found = read_checkpoint(folder)
    weights = {f"weight/{name}": array for name, array in found.model.items()}
    return {**weights, **found.optimizer, "step": np.asarray(found.state["step"])}


def check_equal(ours: dict[int, float], whole: dict[int, float], steps: Sequence[int]) -> None:
    np.testing.assert_allclose(
        [ours.get(step, np.nan) for step in steps],
        [whole[step] for step in steps],
        rtol=0,
        atol=1e-5,
    )


@pytest.fixture(scope="module")
def runs(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("modes")
    whole, handed = folder / "whole", folder / "handed"
    modes = (*MODES, MODES[0])
    jobs = [Job(mode, handed, STEPS * number) for number, mode in enumerate(modes, start=1)]
    # Some steps more for those that begin at the last of them.
    run([Job(MODES[0], whole, STEPS * (len(modes) + 1)), *jobs], environment)
    return whole, handed


def test_a_run_that_is_handed_on_equals_one_in_one_go(runs: tuple[Path, Path]) -> None:
    whole, handed = (losses(out) for out in runs)
    assert list(handed) == list(range(1, STEPS * (len(MODES) + 1) + 1))
    check_equal(handed, whole, list(handed))


@pytest.mark.parametrize(
    ("place", "mode"),
    [pytest.param(place, mode, id=mode.name) for place, mode in enumerate(MODES, start=1)],
)
def test_what_a_mode_writes_is_what_eager_mode_writes(
    runs: tuple[Path, Path], place: int, mode: Mode
) -> None:
    whole, ours = (arrays(checkpoint(out, STEPS * place)) for out in runs)
    assert ours.keys() == whole.keys()
    assert ours["step"] == STEPS * place
    for name, value in whole.items():
        error = np.linalg.norm((ours[name] - value).ravel())
        assert error <= 5e-4 * np.linalg.norm(value.ravel()), name


@pytest.mark.skipif(not ALL, reason="all pairs: ALL=1, about an hour")
def test_every_mode_goes_on_from_every_other(
    runs: tuple[Path, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    whole, handed = runs
    jobs = [
        Job(
            reader,
            taken_up(checkpoint(handed, STEPS * place), tmp_path / f"{writer.name}.{reader.name}"),
            STEPS * (place + 1),
        )
        for reader in sorted(MODES, key=lambda mode: mode.processes)
        for place, writer in enumerate(MODES, start=1)
    ]
    run(jobs, environment)
    for job in jobs:
        steps = [job.last_step - 1, job.last_step]
        check_equal(losses(job.out), losses(whole), steps)


SMALLER = (
    "model.cfg.num_layers=1",
    "model.cfg.hidden_size=8",
    "model.cfg.ffn_hidden_size=16",
    "model.cfg.num_attention_heads=2",
    "optim.lr=3e-3",
    "train.scheduler.gamma=0.9",
)


def old_checkpoint(writer: str, folder: Path) -> Path:
    with tarfile.open(OLD / f"{writer}.tar.gz") as archive:
        archive.extractall(folder / writer)
    return folder / writer / "model_0000001"


def taken_up_old(source: Path, target: Path) -> Path:
    shutil.copytree(source, target / source.name)
    (target / old_runs.LAST).write_text(source.name)
    return target


def test_checkpoints_of_before_are_read_in_both_modes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """They were written after the same two steps."""
    jobs = []
    for writer in ("eager", "graph"):
        old = old_checkpoint(writer, tmp_path)
        for reader in MODES[:2]:
            out = taken_up_old(old, tmp_path / f"{writer}-{reader.name}")
            jobs.append(Job(reader, out, 5))
    run(jobs, environment, (*BASE, *SMALLER))
    first, *others = (losses(job.out) for job in jobs)
    assert list(first) == [3, 4, 5]
    for other in others:
        check_equal(other, first, [3, 4, 5])


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("+optim.amsgrad=true",), ("the checkpoint has no max_exp_avg_sq of",)),
        ((), ("holds no graph, only weights", "train.load_weight")),
    ],
    ids=["other-optimizer", "weights-alone"],
)
def test_a_run_that_cannot_go_on_says_why(
    environment: dict[str, str], tmp_path: Path, change: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    out = taken_up_old(old_checkpoint("eager", tmp_path), tmp_path / "out")
    if not change:
        shutil.rmtree(out / "model_0000001" / "optimizer")
        (out / "model_0000001" / old_runs.MANIFEST).unlink()
    command = ["tools/train_net.py", "--config-file", CONFIG, *BASE, *SMALLER]
    command += ["--resume", *change, f"train.output_dir={out}"]
    result = run_process(command, env=environment, cwd=PROJECTS)
    assert result.returncode == 2, result.stdout
    assert "Traceback" not in result.stdout
    for part in parts:
        assert part in result.stdout
