"""main.py on two machines: one model, and one end. Under a launcher: vit_10b."""

from __future__ import annotations

import os
import sys

from oneflow_accel import launched

import numpy as np
import pytest

from tests.launch import REPOSITORY, free_port, run_process
from tests.machines import KINDS, train_until_one_is_killed, two_machines
from tests.resnet50_imagenet.conftest import MAIN, SMALL, losses

STEPS = 3
# Models that are one model compute the same; see test_runs.py.
FIXED = (*SMALL, "--freeze-bn", "--lr", "0.0003")


@pytest.fixture(scope="module")
def one_process(shapes, run_main, tmp_path_factory) -> dict[int, float]:
    """Losses of one process with the global batch of the two machines."""
    out = tmp_path_factory.mktemp("one")
    run_main(shapes, *FIXED, "--max-steps", str(STEPS), "--output-dir", out)
    return losses(out)


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_two_machines_train_one_model_and_end_together(shapes, one_process, tmp_path, kind):
    outs = [tmp_path / "0", tmp_path / "1"]
    # -b is the batch of a node; two launchers at one address are on one node.
    batch = "4" if kind == "namespaces" else "8"

    def command(rank: int, address: str, port: int) -> list[str | os.PathLike[str]]:
        options = ("-b", batch, "--epochs", "100000", "--output-dir", outs[rank])
        form = ("--world-size", "2", "--rank", str(rank), "--dist-url", f"tcp://{address}:{port}")
        return [sys.executable, MAIN, *form, shapes, *FIXED, *options]

    def ready() -> bool:
        return (outs[0] / "metrics.jsonl").exists() and len(losses(outs[0])) > STEPS

    with two_machines(kind) as machines:
        ended = train_until_one_is_killed(machines, command, tmp_path, outs, ready, cwd=tmp_path)
    assert ended.code != 0
    assert ended.sentence in ended.output, ended.output
    assert "Traceback" not in ended.output
    # Only the first process of the job writes.
    assert not outs[1].exists()
    ours = losses(outs[0])
    np.testing.assert_allclose(
        [ours[step] for step in range(1, STEPS + 1)], list(one_process.values()), rtol=1e-4
    )


# A backend of two devices, which are this CPU both: main.py as it would run on two cards.
TWO_DEVICES = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from resnet50_imagenet import main
from oneflow_accel.backends.cpu import CpuBackend
CpuBackend.device_count = lambda self: 2
CpuBackend.set_device = lambda self, index: print(f"uses device {{index}}", flush=True)
sys.exit(main.main())
"""


def test_main_starts_one_process_for_each_device(shapes, one_process, tmp_path):
    program, out = tmp_path / "two_devices.py", tmp_path / "out"
    program.write_text(TWO_DEVICES)
    url = f"tcp://127.0.0.1:{free_port()}"
    options = ("--multiprocessing-distributed", "--max-steps", str(STEPS), "--output-dir", out)
    done = run_process([program, shapes, *FIXED, *options, "--dist-url", url], timeout=150)
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if "uses device" in line) == [
        "uses device 0",
        "uses device 1",
    ]
    ours = losses(out)
    np.testing.assert_allclose(list(ours.values()), list(one_process.values()), rtol=1e-4)


def test_only_a_launchers_rank_counts(monkeypatch):
    """OneFlow's import sets RANK to -1, which is no launcher's."""
    for value, expected in (("-1", (False, 0)), ("0", (True, 0)), ("2", (True, 2))):
        monkeypatch.setenv("RANK", value)
        assert (launched.launched(), max(launched.rank(), 0)) == expected
