"""The commands as a user types them: training, evaluation, resuming, also onto other layouts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flow_train.metrics.log import metric_series, read_metrics
from libai_projects import weights
from libai_projects.command.config import load_config
from libai_projects.command.output import checkpoint_bytes
from tests.launch import run_process
from tests.libai_projects.train.conftest import (
    CONFIG,
    PROJECTS,
    TINY,
    as_after_step_three,
    bash_command,
    losses,
    metrics,
    newest,
    perplexities,
)


def test_verbatim_command_with_overrides_and_flags_in_any_order(environment, tmp_path):
    out = tmp_path / "out"
    args = (*TINY, "train.train_iter=40", "--device", "cpu", f"train.output_dir={out}")
    longer = ("train.evaluation.eval_period=20", "train.checkpointer.period=20")
    result = run_process(
        bash_command(1, *args, *longer, "train.num_accumulation_steps=2"),
        env={**environment, "FLOW_TRAIN_CURVES": "on", "FLOW_TRAIN_PEAK": ""},
        cwd=PROJECTS,
    )
    assert result.returncode == 0, result.stdout
    curve = losses(out)
    assert list(curve) == list(range(1, 41))
    # From about ln 400, what guessing costs, by much more than the noise between batches.
    assert curve[1] == pytest.approx(math.log(400), abs=0.3)
    assert np.mean(list(curve.values())[-5:]) < curve[1] - 1
    assert perplexities(out)[40] < perplexities(out)[20] < 400
    last = next(line for line in reversed(metrics(out)) if "total_loss" in line)
    assert {"iteration", "total_loss", "lr", "time", "data_time"} <= last.keys()
    for part in (
        "Step: [40/40]",
        "PPL",
        "Throughput",
        "MFU: ",
        "ETA",
        "batch 8 = 4 x 1 x 2",
    ):
        assert part in result.stdout, part
    # AMP is on in the config and not on this device.
    assert "train.amp.enabled=false" in result.stdout
    names = {path.name for path in out.iterdir()}
    assert {"config.yaml", "log.txt", "curves.png", "checkpoints"} <= names
    assert "Step: [40/40]" in (out / "log.txt").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert newest(out) == "step-00000040"
    assert (out / "checkpoints" / "best").read_text().strip() in ("step-00000020", "step-00000040")
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["model"]["cfg"]["vocab_size"] == 512
    assert saved["train"]["global_batch_size"] == 8
    files = list((out / "checkpoints" / "step-00000040").iterdir())
    foreseen = checkpoint_bytes(load_config(str(out / "config.yaml")))
    assert foreseen == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)
    logged = read_metrics(out / "metrics.jsonl")
    steps, values = metric_series(logged, "train", "loss")
    assert dict(zip(steps.tolist(), values, strict=True)) == curve
    line = next(line for line in reversed(logged) if line["split"] == "train")["values"]
    assert {"lr", "step_seconds", "tokens_per_second", "samples_per_second"} <= line.keys()
    assert line["grad_norm"] > 0 < line["mfu"] < 150
    assert 0.05 < line["peak_memory_gb"] < 8
    assert metric_series(logged, "val", "perplexity")[1].tolist() == list(
        perplexities(out).values()
    )
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 41))


def test_resumed_run_equals_whole_one_to_the_last_bit(train, whole_run, tmp_path):
    out = as_after_step_three(whole_run, tmp_path / "out")
    train("--resume", out=out)
    assert losses(out) == losses(whole_run)
    assert perplexities(out) == perplexities(whole_run)
    assert "nothing left to train" in train("--resume", out=out).stdout
    file = out / "checkpoints" / "step-00000006" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"passed over: {file} is damaged" in train("--resume", out=out).stdout
    assert losses(out) == losses(whole_run)


# The command, killed by the first call of one function in it, before or after that does its work.
KILLED = """
import os, sys
sys.path.insert(0, "tools")
import train_net
from flow_train.checkpoint.folders import CheckpointManager
name, after = sys.argv[1:3]
do = getattr(CheckpointManager, name)
def killed(*args):
    if after == "after":
        do(*args)
    os._exit(9)
setattr(CheckpointManager, name, killed)
train_net.main(sys.argv[3:])
"""


def test_killed_beside_a_checkpoint_and_started_again(environment, train, whole_run, tmp_path):
    """The same command each time, as a restart loop has it. No line is lost, no evaluation, and
    nothing is needed to begin with."""
    out = tmp_path / "out"
    command = ["--config-file", CONFIG, *TINY, f"train.output_dir={out}", "--resume"]
    for when in (("_publish", "before"), ("_point_to", "after")):
        killed = run_process(["-c", KILLED, *when, *command], env=environment, cwd=PROJECTS)
        assert killed.returncode == 9, killed.stdout
        assert f"no checkpoint in {out} yet: starting from the beginning" in killed.stdout
    train("--resume", out=out)
    assert losses(out) == losses(whole_run)
    assert perplexities(out) == perplexities(whole_run)


def test_eval_only_finds_what_training_found(train, whole_run, tmp_path):
    config = (whole_run / "config.yaml").read_bytes()
    result = train("--eval-only", out=whole_run)
    for split, found in zip(("validation", "test"), metrics(whole_run)[-2:], strict=True):
        text = f"{split}/lm_loss_PPL: {found[f'{split}/lm_loss_PPL']:.6g}"
        assert text in result.stdout
    assert (whole_run / "config.yaml").read_bytes() == config
    # The weights of the first checkpoint by way of Hugging Face's format.
    state, config = weights.load(whole_run / "checkpoints" / "step-00000003", "libai")
    weights.save_huggingface(state, config, tmp_path / "hf")
    result = train(f"train.load_weight={tmp_path / 'hf'}", "--eval-only", out=tmp_path / "other")
    assert f"validation/lm_loss_PPL: {perplexities(whole_run)[3]:.6g}" in result.stdout


def test_fast_dev_run_takes_weights_and_moves_an_earlier_run_aside(train, whole_run, tmp_path):
    out = as_after_step_three(whole_run, tmp_path / "out")
    before = losses(out)
    train("--fast-dev-run", f"train.load_weight={whole_run}/checkpoints/latest", out=out)
    assert list(losses(out)) == list(range(1, 21))
    # It began with weights that had been trained.
    assert losses(out)[1] < before[1] - 0.1
    assert sorted(perplexities(out)) == [10, 20]
    assert losses(out / "previous-1") == before
    assert newest(out / "previous-1") == "step-00000003"


def test_run_stops_when_evaluations_get_no_better(train, tmp_path):
    """With a learning rate of almost nothing, perplexity stays where it is."""
    out = tmp_path / "out"
    options = ("train.train_iter=50", "train.evaluation.eval_period=1", "optim.lr=1e-30")
    options += ("train.checkpointer.period=1",)
    result = train(*options, "train.evaluation.patience=2", out=out)
    assert "stopping early: val/perplexity has not been better than" in result.stdout
    assert "Traceback" not in result.stdout
    assert list(perplexities(out)) == [1, 2, 3]
    assert perplexities(out)[1] == perplexities(out)[3]
    # It knows its best evaluation where it may go on.
    train(*options, "train.evaluation.patience=4", "--resume", out=out)
    assert list(perplexities(out)) == [1, 2, 3, 4, 5]


def test_a_profile_on_random_tokens(train, tmp_path):
    missing = {"MAGICPROMPT_DATA": "nowhere", "MAGICPROMPT_VOCAB": "nowhere"}
    result = train("--dummy", "--profile", "2", out=tmp_path / "out", env=missing)
    for part in ("random tokens", "a step takes", "GPT_model.logits", "broadcast_matmul"):
        assert part in result.stdout, part
    folder = tmp_path / "out" / "profile"
    assert json.loads((folder / "profile.json").read_text())["traceEvents"]
    assert not (folder / "checkpoints").exists()
