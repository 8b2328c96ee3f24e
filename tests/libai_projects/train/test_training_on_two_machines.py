"""tools/train.sh on two machines: one model, one end, and one checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.launch import run_distributed
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


# The command, with {rank} in its words for the process's.
BY_RANK = f"""
import os, sys
sys.path.insert(0, {str(PROJECTS / "tools")!r})
import train_net
train_net.main([word.replace("{{rank}}", os.environ["RANK"]) for word in sys.argv[1:]])
"""


def test_machines_with_a_disk_each_go_on_from_the_first_ones(environment, tmp_path):
    """It has the only checkpoint; before there is one, all begin."""
    script, out = tmp_path / "by_rank.py", tmp_path / "{rank}"
    script.write_text(BY_RANK)
    command = [script, "--config-file", CONFIG, *TINY, f"train.output_dir={out}", "--resume"]
    for steps, said in ((3, "starting from the beginning"), (6, "6 iterations from 3 on")):
        args = [*command, f"train.train_iter={steps}"]
        result = run_distributed(args, 2, env=environment, cwd=PROJECTS)
        assert result.returncode == 0, result.stdout
        assert said in result.stdout
    assert list(losses(tmp_path / "0")) == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "1").glob("model_*"))
