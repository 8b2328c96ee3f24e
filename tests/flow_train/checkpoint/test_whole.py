"""Whole arrays on the way to a file and from it, one at a time, on one process and two."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint.folders import Checkpoint, CheckpointManager, read_checkpoint
from flow_train.checkpoint.whole import Gathered, Spread
from tests.launch import run_distributed

VALUES = {
    "rows": np.arange(12, dtype=np.float32).reshape(4, 3),
    "all": np.arange(5, dtype=np.int64),
    "brain": np.array([0.5, -3.25], np.float32),
}


def tensors() -> dict[str, flow.Tensor]:
    """The same as global tensors: cut, whole on each process, and in bfloat16."""
    placement = flow.placement("cpu", list(range(distributed.world_size())))
    whole = flow.sbp.broadcast
    found = {n: flow.tensor(a, placement=placement, sbp=whole) for n, a in VALUES.items()}
    found["rows"] = found["rows"].to_global(sbp=flow.sbp.split(0))
    return {**found, "brain": found["brain"].to(flow.bfloat16)}


def same(arrays: dict[str, np.ndarray]) -> bool:
    return arrays.keys() == VALUES.keys() and all(
        array.dtype == VALUES[name].dtype and np.array_equal(array, VALUES[name])
        for name, array in arrays.items()
    )


def test_gathered_are_read_once_and_in_order() -> None:
    with pytest.raises(KeyError, match=r"brain is not the next of the tensors .*, rows"):
        Gathered(tensors())["brain"]
    gathered = Gathered(tensors())
    assert list(gathered) == list(VALUES)
    assert gathered.kinds() == {name: (a.dtype, a.shape) for name, a in VALUES.items()}
    assert same({name: gathered[name] for name in VALUES})
    gathered.drain()
    with pytest.raises(IndexError):
        gathered["rows"]
    spread = Spread(VALUES, ["rows"])
    assert dict(spread) == {"rows": VALUES["rows"]}
    with pytest.raises(KeyError):
        spread["all"]


def in_two_processes(folder: Path) -> dict[str, Any]:
    """What one of two finds out; started by the test below."""
    rank = distributed.rank()
    gathered, facts = Gathered(tensors()), {}
    if rank == 0:
        # The other drains from the first on.
        facts["gathered"] = same({name: gathered[name] for name in gathered})
    gathered.drain()
    spread = Spread(VALUES if rank == 1 else {}, list(VALUES), rank=1)
    facts["spread"] = same(dict(spread))

    manager = CheckpointManager(folder)
    for step, limit in ((1, resource.RLIM_INFINITY), (2, 100), (3, resource.RLIM_INFINITY)):
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        checkpoint = Checkpoint(Gathered(tensors()), Gathered(tensors()), {"step": step})
        try:
            manager.save_gathered(checkpoint, step=step)
        except CheckpointError as error:
            facts[f"error of {step}"] = str(error)
        facts[f"steps after {step}"] = distributed.all_gather_json(sorted(manager.steps()))[0]
    return facts


def test_two_processes_write_and_read_and_a_full_disk_is_an_error_of_both(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = run_distributed([__file__, folder], 2, timeout=90)
    assert done.returncode == 0, done.stdout
    # The launcher may put two lines into one.
    facts = [json.loads(text.partition("}")[0] + "}") for text in done.stdout.split("facts: ")[1:]]
    assert [each.pop("gathered") for each in facts if "gathered" in each] == [True]
    error = facts[0].pop("error of 2")
    assert error.startswith(f"the checkpoint of step 2 could not be written to {folder}: File too")
    assert error.endswith("earlier checkpoints are intact")
    assert facts[1].pop("error of 2") == error
    steps = {"steps after 1": [1], "steps after 2": [1], "steps after 3": [1, 3]}
    assert facts == [{"spread": True, **steps}] * 2
    for step in (1, 3):
        found = read_checkpoint(folder / f"step-{step:08d}")
        assert same(found.model)
        assert same(found.optimizer)


if __name__ == "__main__":
    print(f"facts: {json.dumps(in_two_processes(Path(sys.argv[1])))}", flush=True)
