"""Training GPT-2 with Monarch layers by the command, going on after a stop, and generating."""

from __future__ import annotations

from libai_projects import weights
from tests.launch import run_process
from tests.libai_projects.train.conftest import PROJECTS, as_after_step_three, losses, perplexities

MONARCH = ("model.cfg.mlp_cfg=monarch", "model.cfg.attnproj_cfg={_target_: monarch, nblocks: 2}")


def test_a_run_its_resumption_and_its_model(train, environment, tmp_path):
    whole = tmp_path / "whole"
    result = train(*MONARCH, out=whole)
    # Feed-forward factors 2 x (4 x 16 x 16 + 4 x 32 x 16), attention's output 2 x 2 x 32 x 32.
    block = 2 * 3072 + 64 + 128 + 4096 + 64 + 64 * 192 + 192 + 4 * 64
    assert f"of {2 * block + 512 * 64 + 32 * 64 + 2 * 64:,} weights" in result.stdout
    assert losses(whole)[6] < losses(whole)[1]
    out = as_after_step_three(whole, tmp_path / "out")
    train(*MONARCH, "--resume", out=out)
    assert losses(out) == losses(whole)
    assert perplexities(out) == perplexities(whole)
    _, config = weights.load(whole / "model_final", "libai")
    assert config["mlp_cfg"] == {"_target_": "monarch_flow.layers.MonarchLinear", "nblocks": 4}
    assert config["attnproj_cfg"]["nblocks"] == 2
    assert "attnlinear_cfg" not in config
    # The inference config says dense; what counts is what the weights are.
    command = ["projects/MagicPrompt/pipeline.py", "--model", whole, "--prompt", "a cute pig"]
    generated = run_process([*command, "--max-length", "8"], env=environment, cwd=PROJECTS)
    assert generated.returncode == 0, generated.stdout
    assert "a cute pig" in generated.stdout
