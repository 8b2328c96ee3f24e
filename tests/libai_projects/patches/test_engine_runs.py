"""Whole runs on libai's tiny GPT: resumed bit for bit, in other layouts, by LiBai; a full disk."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from oneflow_accel.errors import CheckpointError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint.folders import Checkpoint, newest_checkpoint, read_checkpoint
from libai_projects.weights import convert
from libai_projects.weights.loading import load_checkpoint
from tests.launch import run_distributed, run_process
from tests.libai_projects.patches.engine_run import make_documents, write_dataset

SCRIPT = Path(__file__).with_name("engine_run.py")
ENV = {"ONEFLOW_ACCEL_DEVICE": "cpu", "ONEFLOW_ACCEL_THREADS": "1"}
DATA = {"data_parallel_size": 2}
ACCUMULATED = {
    "dropout": 0.1,
    "set": {
        # Two batches of 2 instead of one of 4.
        "train.train_micro_batch_size": 2,
        "train.num_accumulation_steps": 2,
        "train.amp.enabled": True,
        "train.checkpointer.save_model_after_n_epoch": 0.15,
        "train.evaluation.eval_after_n_epoch": 0.2,
    },
}


def start(folder: Path, processes: int = 1, **options: Any) -> CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    if not (folder / "data.idx").exists():
        write_dataset(folder / "data", make_documents())
    arguments = [SCRIPT, json.dumps({"folder": str(folder), **options})]
    if processes == 1:
        return run_process(arguments, timeout=100, env=ENV)
    # The launcher writes its logs into the current folder.
    return run_distributed(arguments, processes, timeout=120, env=ENV, cwd=folder)


def run(folder: Path, processes: int = 1, **options: Any) -> dict[str, Any]:
    """The run's result; its "output" is what it printed."""
    process = start(folder, processes, **options)
    assert process.returncode == 0, process.stdout[-5000:]
    return {**json.loads((folder / "result.json").read_text()), "output": process.stdout}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "out" / "checkpoints" / f"step-{step:08d}"


def last_losses(result: dict[str, Any], first: int = 4) -> dict[str, float]:
    return {step: loss for step, loss in result["losses"].items() if int(step) >= first}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("single")
    result = run(folder, set={"train.evaluation.eval_period": 4})
    return {**result, "folder": folder}


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accumulated")
    return {**run(folder, **ACCUMULATED), "folder": folder}


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_libais_own_trainer_goes_on_with_a_converted_run(
    single: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    source, target = checkpoint(single["folder"], 3), tmp_path / "out"
    line = [str(source), str(target), "--from", "libai", "--to", "libai", "--resumable", mode]
    assert convert.main(line) == 0
    assert (target / "last_checkpoint").read_text() == "model_0000002"
    result = run(tmp_path, libais=True, resume=True, graph=mode == "graph")
    assert result["losses"] == pytest.approx(last_losses(single), abs=1e-5)
    assert result["samples"] == single["samples"][3:]
    # By LiBai's own evaluation, on any device.
    assert 1 < result["evaluation"]["lm_loss_PPL"] < 96


def test_one_that_libai_would_count_otherwise_is_not_converted(
    accumulated: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(accumulated["folder"], 6)
    line = [str(source), str(tmp_path / "out"), "--from", "libai", "--to", "libai"]
    assert convert.main([*line, "--resumable", "eager"]) == 2
    assert "LiBai counts otherwise in eager mode: take graph" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_killed_goes_on_bit_for_bit_with_dropout(
    accumulated: dict[str, Any], tmp_path: Path
) -> None:
    whole = accumulated
    assert whole["amp"] is False
    assert "cpu: train.amp.enabled=false: " in whole["output"]
    # 70 % of 95 blocks of 16 tokens, in batches of 4.
    assert (whole["period"], whole["eval_period"]) == (3, 4)
    killed = start(tmp_path, kill_after=5, **ACCUMULATED)
    assert killed.returncode == -9
    # One is due after 3 steps, and that of step 4 is the best one.
    folders = checkpoint(tmp_path, 3).parent
    assert sorted(p.name for p in folders.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert (folders / "best").read_text() == "step-00000004\n"
    resumed = run(tmp_path, resume=True, **ACCUMULATED)
    assert resumed["losses"] == last_losses(whole, 5)
    assert resumed["samples"] == whole["samples"][8:]
    assert resumed["evaluation"] == whole["evaluation"]
    assert (folders / "best").read_text() == "step-00000006\n"


def perplexities(result: dict[str, Any]) -> dict[str, float]:
    return {
        f"{split}/{key}": value
        for split, values in result["evaluation"].items()
        for key, value in values.items()
    }


def test_data_parallel_is_as_one_process_and_a_full_disk_spoils_nothing(
    single: dict[str, Any], tmp_path: Path
) -> None:
    result = run(tmp_path, 2, dist=DATA, full_disk=True)
    assert result["losses"] == pytest.approx(single["losses"], abs=1e-5)
    assert result["samples"] == single["samples"]
    # 27 rows in batches of 4 on 2 processes: the last batch is short and one row is a filler.
    assert perplexities(result) == pytest.approx(perplexities(single), rel=1e-5)
    assert result["evaluation"]["val"]["tokens"] == 27 * 16
    assert "the checkpoint of step 6 could not be written" in result["full_disk"]
    assert "File too large; earlier checkpoints are intact" in result["full_disk"]
    newest = newest_checkpoint(tmp_path / "out")
    assert newest == checkpoint(tmp_path, 6)
    assert read_checkpoint(newest).state["step"] == 6
    assert [path.name for path in newest.parent.glob(".*")] == [".lock"]


def test_the_best_model_follows_validation(single: dict[str, Any]) -> None:
    out = single["folder"] / "out"
    results = [json.loads(line) for line in (out / "metrics.json").open()]
    validation = [line.get("validation/lm_loss_PPL") for line in results]
    validation = [value for value in validation if value is not None]
    assert len(validation) == 2
    assert validation[-1] == single["evaluation"]["val"]["perplexity"]
    assert "test/lm_loss_PPL" in results[-1] or "test/lm_loss_PPL" in results[-2]
    best = read_checkpoint(out / "checkpoints" / "best").state["callbacks"]["model_checkpoint"]
    assert best["kept"] == [[min(validation), 6]]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    placed = {"placement": flow.placement("cpu", [0]), "sbp": flow.sbp.broadcast}
    model = flow.nn.Linear(3, 2).to_global(**placed)
    arrays = {"weight": np.full((2, 3), 7, np.float32), "bias": np.ones(2, np.float32)}
    load_checkpoint(model, Checkpoint(arrays, folder=Path("step-00000003")))
    assert np.array_equal(model.weight.numpy(), arrays["weight"])
    for wrong in ({"weight": arrays["weight"]}, {**arrays, "bias": np.ones(3, np.float32)}):
        with pytest.raises(CheckpointError, match=r"step-00000003 is of another model: 1 .* bias"):
            load_checkpoint(model, Checkpoint(wrong, folder=Path("step-00000003")))
