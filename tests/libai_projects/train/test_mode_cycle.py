"""A run goes on in every mode (eager or nn.Graph, processes, layouts) from what another mode wrote.

It is handed on from mode to mode, two steps each, and equals one that nobody interrupted: losses,
weights and moments. The same starts show that a seed gives one model in each layout, and that
runs go on from checkpoints of before.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from flow_train.checkpoint.folders import read_checkpoint
from libai_projects.weights import old_runs
from tests.launch import REPOSITORY, run_distributed, run_process
from tests.libai_projects.train.conftest import CONFIG, NO_DROPOUT, PROJECTS, TINY, losses

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
# On micro batches the stages of a graph overlap.
MICRO = ("train.num_accumulation_steps=2",)
ZERO = (*GRAPH, "train.zero_optimization.enabled=true", "train.zero_optimization.stage=2")


@dataclass(frozen=True)
class Job:
    """A run, from its folder's last checkpoint on where there is one, up to a step."""

    out: Path
    last_step: int
    processes: int = 1
    options: tuple[str, ...] = ()


# In the order in which they go on; processes that are not tensor or pipeline parallel are data
# parallel.
MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "eager": (1, ()),
    "graph": (1, GRAPH),
    "graph-pipeline": (2, (*GRAPH, *PIPELINE, *MICRO)),
    "graph-ZeRO2": (2, ZERO),
    "eager-tensor-pipeline": (4, (*TENSOR, *PIPELINE)),
    "eager again": (1, ()),
}
# A step that moves nothing, and a checkpoint after it; Monarch layers beside dense ones.
ONE_STEP = (
    "optim.lr=0",
    "train.checkpointer.period=1",
    "model.cfg.mlp_cfg={_target_: monarch, nblocks: 4}",
)
SEEDED = {
    "one process": (1, ()),
    "data-tensor": (4, TENSOR),
    "tensor-pipeline": (4, (*TENSOR, *PIPELINE)),
}
# The model of the checkpoints of before.
SMALLER = (
    "model.cfg.num_layers=1",
    "model.cfg.hidden_size=8",
    "model.cfg.ffn_hidden_size=16",
    "model.cfg.num_attention_heads=2",
    "optim.lr=3e-3",
    "train.scheduler.gamma=0.9",
)


def run(jobs: Sequence[Job], environment: dict[str, str]) -> None:
    """Jobs in a row that take as many processes share a start."""
    for processes, group in groupby(jobs, key=lambda job: job.processes):
        same = list(group)
        lists = [
            [
                *("--config-file", str(PROJECTS / CONFIG), *BASE, *job.options),
                *("--resume", f"train.output_dir={job.out}", f"train.train_iter={job.last_step}"),
            ]
            for job in same
        ]
        command, timeout = [WORKER, json.dumps(lists)], 60 + 30 * len(same)
        if processes == 1:
            result = run_process(command, timeout=timeout, env=environment)
        else:
            folder = same[0].out.parent
            result = run_distributed(
                command, processes, timeout=timeout, env=environment, cwd=folder
            )
        error = max(result.stdout.find("user error"), 0)
        assert result.returncode == 0, result.stdout[error:][-30000:]


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Weights and moments of a checkpoint, and the number of steps."""
    found = read_checkpoint(folder)
    weights = {f"weight/{name}": array for name, array in found.model.items()}
    return {**weights, **found.optimizer, "step": np.asarray(found.state["step"])}


def old_run(writer: str, out: Path) -> Path:
    out.mkdir()
    with tarfile.open(OLD / f"{writer}.tar.gz") as archive:
        archive.extractall(out)
    (out / old_runs.LAST).write_text("model_0000001")
    return out


@pytest.fixture(scope="module")
def runs(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: `whole`, `handed` from mode to mode, those of SEEDED, and two that took
    up old checkpoints of the other mode."""
    folder = tmp_path_factory.mktemp("modes")
    jobs = [
        Job(folder / "handed", STEPS * number, *mode)
        for number, mode in enumerate(MODES.values(), start=1)
    ]
    jobs += [
        Job(folder / name, 1, processes, (*ONE_STEP, *options))
        for name, (processes, options) in SEEDED.items()
    ]
    for writer, options in (("eager", GRAPH), ("graph", ())):
        out = old_run(writer, folder / f"old {writer}")
        jobs.append(Job(out, 5, 1, (*SMALLER, *options)))
    jobs.append(Job(folder / "whole", STEPS * len(MODES)))
    # What is handed on needs what comes before it, and only that: the last of it at the end.
    first, last = jobs[: len(MODES) - 1], jobs[len(MODES) - 1]
    others = sorted(jobs[len(MODES) :], key=lambda job: -job.processes)
    run([*first, *others, last], environment)
    return folder


@pytest.mark.release
def test_a_run_that_is_handed_on_equals_one_in_one_go(runs: Path) -> None:
    whole, handed = losses(runs / "whole"), losses(runs / "handed")
    assert list(handed) == list(range(1, STEPS * len(MODES) + 1))
    assert handed == pytest.approx(whole, rel=0, abs=1e-5)


@pytest.mark.release
@pytest.mark.parametrize("mode", MODES)
def test_what_a_mode_writes_is_what_eager_mode_writes(runs: Path, mode: str) -> None:
    step = STEPS * (list(MODES).index(mode) + 1)
    whole, ours = (arrays(checkpoint(runs / name, step)) for name in ("whole", "handed"))
    assert ours.keys() == whole.keys()
    assert ours["step"] == step
    for name, value in whole.items():
        error = np.linalg.norm((ours[name] - value).ravel())
        assert error <= 5e-4 * np.linalg.norm(value.ravel()), name


@pytest.mark.release
def test_one_seed_is_one_model_to_the_last_bit(runs: Path) -> None:
    whole, *others = (arrays(checkpoint(runs / name, 1)) for name in SEEDED)
    weights = [name for name in whole if name.startswith("weight/")]
    assert any("blkdiag1" in name for name in weights)
    assert any("query_key_value.weight" in name for name in weights)
    for other in others:
        for name in weights:
            np.testing.assert_array_equal(other[name], whole[name], name)


@pytest.mark.release
def test_checkpoints_of_before_are_read_in_the_other_mode(runs: Path) -> None:
    """They were written after the same two steps."""
    graph, eager = losses(runs / "old eager"), losses(runs / "old graph")
    assert list(eager) == [3, 4, 5]
    assert graph == pytest.approx(eager, rel=0, abs=1e-5)


def test_a_run_with_another_optimizer_says_what_it_lacks(train, tmp_path):
    out = old_run("eager", tmp_path / "out")
    changed = train(*BASE, *SMALLER, "--resume", "+optim.amsgrad=true", out=out, ok=False)
    assert changed.returncode == 2, changed.stdout
    assert "Traceback" not in changed.stdout
    assert "the checkpoint has no max_exp_avg_sq of" in changed.stdout
