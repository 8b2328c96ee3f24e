"""Training GPT-2 with Monarch layers by the command, a switch to dense layers, and generating."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flow_train.checkpoint.folders import read_checkpoint
from flow_train.metrics.log import read_metrics
from libai_projects import weights
from tests.launch import run_process
from tests.libai_projects.train.conftest import (
    NO_DROPOUT,
    PROJECTS,
    as_after_step_three,
    losses,
    perplexities,
)

MONARCH = ("model.cfg.mlp_cfg=monarch", "model.cfg.attnproj_cfg={_target_: monarch, nblocks: 2}")


def test_a_run_and_its_model(train, environment, tmp_path):
    whole = tmp_path / "whole"
    result = train(*MONARCH, out=whole)
    # Feed-forward factors 2 x (4 x 16 x 16 + 4 x 32 x 16), attention's output 2 x 2 x 32 x 32.
    block = 2 * 3072 + 64 + 128 + 4096 + 64 + 64 * 192 + 192 + 4 * 64
    assert f"of {2 * block + 512 * 64 + 32 * 64 + 2 * 64:,} weights" in result.stdout
    assert losses(whole)[6] < losses(whole)[1]
    _, config = weights.load(whole / "checkpoints" / "step-00000006", "libai")
    assert config["mlp_cfg"] == {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
    assert config["attnproj_cfg"]["nblocks"] == 2
    assert "attnlinear_cfg" not in config
    # The inference config says dense; what counts is what the weights are.
    command = ["projects/MagicPrompt/pipeline.py", "--model", whole, "--prompt", "a cute pig"]
    generated = run_process([*command, "--max-length", "8"], env=environment, cwd=PROJECTS)
    assert generated.returncode == 0, generated.stdout
    assert "a cute pig" in generated.stdout


def test_factors_have_a_rate_of_their_own(train, tmp_path):
    rates = "+optim.params.overrides={blkdiag1: {lr: 0.0}, blkdiag2: {lr: 1.2e-2}}"
    run = (*MONARCH, *NO_DROPOUT, rates, "train.warmup_ratio=0.5")
    train(*run, out=tmp_path)
    train(*run, "graph.enabled=true", out=tmp_path / "graph")
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path), rel=1e-5)
    folders = sorted((tmp_path / "checkpoints").glob("step-*"))
    before, after = (read_checkpoint(folder).model for folder in folders)
    moved = {name for name in after if (after[name] != before[name]).any()}
    assert moved
    assert moved == {name for name in after if "blkdiag1" not in name}


BLOCKS = ("model.cfg.attnlinear_cfg=blockdiag", "model.cfg.mlp_cfg=monarch", *NO_DROPOUT)


@pytest.fixture(scope="module")
def dense_early(train, tmp_path_factory) -> Path:
    """Structured for two of six steps, dense from then on."""
    out = tmp_path_factory.mktemp("early") / "out"
    train(*BLOCKS, "train.sparse_to_dense.fraction=0.3", out=out)
    return out


def test_layers_become_dense_and_compute_the_same(train, dense_early):
    switch = [
        line for line in read_metrics(dense_early / "metrics.jsonl") if line["split"] == "switch"
    ]
    (values,) = (line["values"] for line in switch)
    assert values["loss_after"] == pytest.approx(values["loss_before"], abs=1e-5)
    assert losses(dense_early)[6] < losses(dense_early)[1]
    _, config = weights.load(dense_early / "checkpoints" / "step-00000006", "libai")
    assert not {"mlp_cfg", "attnlinear_cfg"} & config.keys()
    train(*BLOCKS, "train.sparse_to_dense.fraction=0.3", "--eval-only", out=dense_early)
    evaluated = json.loads((dense_early / "evaluation" / "evaluation.json").read_text())
    expected = perplexities(dense_early)[6]
    assert evaluated["validation/lm_loss_PPL"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_a_run_goes_on_after_the_switch_and_before_it(fraction, train, dense_early, tmp_path):
    switched = f"train.sparse_to_dense.fraction={fraction}"
    whole = dense_early
    if fraction != 0.3:
        whole = tmp_path / "whole"
        train(*BLOCKS, switched, out=whole)
    out = as_after_step_three(whole, tmp_path / "out")
    train(*BLOCKS, switched, "--resume", out=out)
    assert losses(out) == losses(whole)
    assert perplexities(out) == perplexities(whole)


@pytest.mark.release
def test_the_switch_under_nn_graph_and_tensor_parallelism(train, dense_early, tmp_path):
    out = tmp_path / "out"
    layout = ("graph.enabled=true", "train.dist.tensor_parallel_size=2")
    train(*BLOCKS, *layout, "train.sparse_to_dense.fraction=0.3", out=out, processes=2)
    assert losses(out) == pytest.approx(losses(dense_early), rel=1e-5)
    assert perplexities(out) == pytest.approx(perplexities(dense_early), rel=1e-5)
