"""tools/train.sh on two machines: one model, one end, and one checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.libai_projects.train.conftest import CONFIG, PROJECTS, SCRIPT, TINY, losses
from tests.machines import KINDS, train_until_one_is_killed, two_machines


@pytest.mark.parametrize("kind", KINDS)
def test_two_machines_train_one_model_and_end_together(environment, tmp_path, kind):
    outs = [tmp_path / "0", tmp_path / "1"]

    def command(rank: int, address: str, port: int) -> list[str]:
        # A model whose layers both machines hold the halves of.
        options = ("train.train_iter=100000", "train.checkpointer.period=100000")
        options += ("train.dist.tensor_parallel_size=2", "train.evaluation.enabled=false")
        script = ["bash", "tools/train.sh", SCRIPT, CONFIG, "1"]
        return [*script, *TINY, *options, f"train.output_dir={outs[rank]}"]

    def variables(rank: int, address: str, port: int) -> Mapping[str, str]:
        where = {"NODE": "2", "NODE_RANK": str(rank), "ADDR": address, "PORT": str(port)}
        return {**environment, **where}

    def ready() -> bool:
        return (outs[0] / "metrics.json").exists() and len(losses(outs[0])) > 2

    with two_machines(kind) as machines:
        ended = train_until_one_is_killed(
            machines, command, tmp_path, outs, ready, env=variables, cwd=PROJECTS
        )
    assert ended.code != 0
    assert ended.sentence in ended.output, ended.output
    assert "Traceback" not in ended.output
    # Only the first process of the job writes.
    assert not (outs[1] / "metrics.json").exists()
