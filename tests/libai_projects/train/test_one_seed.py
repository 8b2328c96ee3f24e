"""One seed is one model: the initial weights are the same to the last bit in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.libai_projects.train.conftest import TINY_MODEL
from tests.libai_projects.train.test_mode_cycle import (
    BASE,
    GRAPH,
    PIPELINE,
    TENSOR,
    Job,
    Mode,
    arrays,
    checkpoint,
    run,
    zero,
)

MODES = (
    Mode("eager", 1),
    Mode("ZeRO", 2, zero(3)),
    Mode("graph-tensor-pipeline", 4, (*GRAPH, *TENSOR, *PIPELINE)),
)
# A step that moves nothing, and a checkpoint after it; Monarch layers beside dense ones.
ONE_STEP = (
    *BASE,
    *TINY_MODEL,
    "optim.lr=0",
    "train.checkpointer.period=1",
    "model.cfg.mlp_cfg={_target_: monarch, nblocks: 4}",
)


def test_initial_weights_are_those_of_one_process(
    environment: dict[str, str], tmp_path: Path
) -> None:
    jobs = [Job(mode, tmp_path / mode.name, 1) for mode in MODES]
    run(jobs, environment, ONE_STEP)
    whole, *others = (arrays(checkpoint(job.out, 1)) for job in jobs)
    weights = [name for name in whole if name.startswith("weight/")]
    assert any("blkdiag1" in name for name in weights)
    assert any("query_key_value.weight" in name for name in weights)
    for job, other in zip(jobs[1:], others, strict=True):
        for name in weights:
            np.testing.assert_array_equal(other[name], whole[name], f"{job.mode.name}: {name}")
