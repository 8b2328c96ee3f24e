"""monarch_flow.train on two machines: one model, and one end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.machines import KINDS, train_until_one_is_killed, two_machines
from tests.monarch_flow.engine.engine_runs import values


def arguments(digits: Path, run_dir: Path) -> list[str]:
    """A run that does not end by itself, a log line for each step of two."""
    options = [f"datamodule.data_dir={digits}", "datamodule.val_split=64", "experiment=mnist/vit"]
    options += ["trainer.max_epochs=100000", "trainer.log_every_n_steps=1"]
    options += ["datamodule.batch_size=16", "datamodule.num_workers=0"]
    return [*options, "trainer.limit_val_batches=1", f"run_dir={run_dir}"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_machines_train_one_model_and_end_together(digits, tmp_path, kind):
    outs = [tmp_path / "0", tmp_path / "1"]

    def command(rank: int, address: str, port: int) -> list[str]:
        launcher = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "1"]
        launcher += ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", address]
        launcher += ["--master_port", str(port), "-m", "monarch_flow.train"]
        return [*launcher, *arguments(digits, outs[rank])]

    def ready() -> bool:
        return (outs[0] / "metrics.jsonl").exists() and len(values(outs[0])) > 2

    with two_machines(kind) as machines:
        ended = train_until_one_is_killed(machines, command, tmp_path, outs, ready, cwd=tmp_path)
    assert ended.code != 0
    assert ended.sentence in ended.output, ended.output
    assert "Traceback" not in ended.output
    # Only the first process of the job writes.
    assert not (outs[1] / "metrics.jsonl").exists()
