"""Whole runs of our trainer on libai's tiny GPT: resumed bit for bit, other layouts, full disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from flow_train.checkpoint import libai_files
from tests.launch import run_distributed, run_process
from tests.libai_projects.patches.engine_run import make_documents, write_dataset
from tests.libai_projects.patches.partial_series import VARIABLE
from tests.modes import only_all

SCRIPT = Path(__file__).with_name("engine_run.py")
ENV = {"ONEFLOW_ACCEL_DEVICE": "cpu", "ONEFLOW_ACCEL_THREADS": "1"}
PIPELINE = {"pipeline_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2}
DATA = {"data_parallel_size": 2}


def start(
    folder: Path, processes: int = 1, before: str = "", **options: Any
) -> CompletedProcess[str]:
    """Start a run; with `before` by LiBai's own trainer and its patches before that one only."""
    env = {**ENV, VARIABLE: before}
    folder.mkdir(exist_ok=True)
    if not (folder / "data.idx").exists():
        write_dataset(folder / "data", make_documents())
    arguments = [SCRIPT, json.dumps({"folder": str(folder), **options})]
    if processes == 1:
        return run_process(arguments, timeout=100, env=env)
    # The launcher writes its logs into the current folder.
    return run_distributed(arguments, processes, timeout=120, env=env, cwd=folder)


def run(folder: Path, processes: int = 1, **options: Any) -> dict[str, Any]:
    """The run's result; its "output" is what it printed."""
    process = start(folder, processes, **options)
    assert process.returncode == 0, process.stdout[-5000:]
    return {**json.loads((folder / "result.json").read_text()), "output": process.stdout}


def back_to(folder: Path, name: str) -> None:
    """Leave this checkpoint only, as if the run had been stopped after it."""
    for path in (folder / "out").glob("model*"):
        if path.name != name:
            shutil.rmtree(path)
    (folder / "out" / "last_checkpoint").write_text(name)


def check_continued(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    """The resumed run took the same last 3 of 6 steps."""
    assert resumed["losses"] == {step: whole["losses"][step] for step in ("3", "4", "5")}
    assert resumed["samples"] == whole["samples"][3:]
    assert resumed["evaluation"] == whole["evaluation"]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("single")
    result = run(folder, set={"train.evaluation.eval_period": 4})
    return {**result, "folder": folder}


@only_all
def test_unpatched_a_resumed_run_begins_with_the_first_sample(tmp_path: Path) -> None:
    options = {"before": "0020", "set": {"train.evaluation.enabled": False}}
    whole = run(tmp_path, **options)
    assert (tmp_path / "out" / "last_checkpoint").read_text() == "model_final"
    (tmp_path / "out" / "last_checkpoint").write_text("model_0000002")
    resumed = run(tmp_path, resume=True, **options)
    assert resumed["samples"] == whole["samples"][:3]
    assert resumed["losses"]["3"] != whole["losses"]["3"]


def test_libais_own_trainer_trains_and_evaluates_on_any_device(
    single: dict[str, Any], tmp_path: Path
) -> None:
    """With the patches; nothing else of ours is in it."""
    result = run(tmp_path, libais=True)
    assert result["losses"]["0"] == pytest.approx(single["losses"]["0"], abs=0.1)
    assert 1 < result["evaluation"]["lm_loss_PPL"] < 96


def test_a_run_that_was_killed_goes_on_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    options = {
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
    whole = run(tmp_path / "whole", **options)
    assert whole["amp"] is False
    assert "cpu: train.amp.enabled=false: " in whole["output"]
    # 70 % of 95 blocks of 16 tokens, in batches of 4.
    assert (whole["period"], whole["eval_period"]) == (3, 4)
    killed = start(tmp_path / "killed", kill_after=4, **options)
    assert killed.returncode == -9
    names = [path.name for path in (tmp_path / "killed" / "out").glob("model*")]
    assert sorted(names) == ["model_0000002", "model_best"]
    best = (tmp_path / "killed" / "out" / "model_best" / "best" / "pickled_data").read_bytes()
    resumed = run(tmp_path / "killed", resume=True, **options)
    assert resumed["losses"] == {step: whole["losses"][step] for step in ("3", "4", "5")}
    assert resumed["samples"] == whole["samples"][6:]
    assert resumed["evaluation"] == whole["evaluation"]
    assert "Saved best model" in resumed["output"]
    assert best != b""


def test_a_graph_goes_on_bit_for_bit_and_eagerly_with_its_moments(tmp_path: Path) -> None:
    whole = run(tmp_path, graph=True)
    back_to(tmp_path, "model_0000002")
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    check_continued(whole, run(tmp_path, graph=True, resume=True))
    eager = run(copy, resume=True)
    expected = {step: whole["losses"][step] for step in ("3", "4", "5")}
    assert eager["losses"] == pytest.approx(expected, abs=1e-5)


@only_all
def test_a_pipeline_goes_on_as_tensor_parallel(single: dict[str, Any], tmp_path: Path) -> None:
    piped = run(tmp_path, 2, dist=PIPELINE)
    assert piped["losses"] == pytest.approx(single["losses"], abs=1e-5)
    assert piped["samples"] == single["samples"]
    assert perplexities(piped) == pytest.approx(perplexities(single), rel=1e-5)
    back_to(tmp_path, "model_0000002")
    resumed = run(tmp_path, 2, dist=TENSOR, resume=True)
    assert resumed["losses"] == pytest.approx(
        {step: single["losses"][step] for step in ("3", "4", "5")}, abs=1e-5
    )
    assert resumed["samples"] == single["samples"][3:]
    assert perplexities(resumed) == pytest.approx(perplexities(single), rel=1e-5)


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
    assert perplexities(result)["validation/lm_loss_tokens"] == 27 * 16
    assert (
        "no checkpoint model_0000099 was saved, earlier ones are as before" in result["full_disk"]
    )
    assert "File too large" in result["full_disk"]
    newest = libai_files.last(tmp_path / "out")
    assert newest is not None
    assert newest.name == "model_0000005"
    assert not list((tmp_path / "out").glob(".*"))


def test_the_best_model_follows_validation(single: dict[str, Any]) -> None:
    results = [json.loads(line) for line in (single["folder"] / "out/metrics.json").open()]
    validation = [line.get("validation/lm_loss_PPL") for line in results]
    validation = [value for value in validation if value is not None]
    assert len(validation) == 2
    assert validation[-1] == single["evaluation"]["validation"]["lm_loss_PPL"]
    assert "test/lm_loss_PPL" in results[-1] or "test/lm_loss_PPL" in results[-2]
    from flow_train.checkpoint import oneflow_files

    best = oneflow_files.read_structure(single["folder"] / "out/model_best/best")
    assert best["value"] == min(validation)
    assert best["metric"] == "lm_loss_PPL"


def test_resuming_without_an_intact_checkpoint_is_one_sentence(single: dict[str, Any]) -> None:
    folder = single["folder"]
    name = (folder / "out" / "last_checkpoint").read_text()
    file = next((folder / "out" / name / "model").glob("*/out"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    try:
        process = start(folder, resume=True)
    finally:
        file.write_bytes(content)
    assert process.returncode == 2
    assert "user error: " in process.stdout
    assert f"{file} is corrupt" in process.stdout
    assert "the newest intact checkpoint is model_0000002" in process.stdout
