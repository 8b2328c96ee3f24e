"""The project as its README tells it: from a text file, through a training, to prompts."""

from __future__ import annotations

from pathlib import Path

from tests.launch import run_process
from tests.libai_projects.train.conftest import PROJECTS, SCRIPT, losses, perplexities

CONFIG = "projects/MagicPrompt/configs/gpt2_small_cpu.py"
SMALLER = (
    "model.cfg.num_layers=2",
    "model.cfg.hidden_size=128",
    "model.cfg.ffn_hidden_size=512",
    "model.cfg.max_seq_length=64",
    "optim.lr=3e-3",
    "dataloader.train.num_workers=0",
    "dataloader.train.splits=[[800,150,50]]",
    "train.log_period=10",
    "train.evaluation.eval_period=20",
    "train.checkpointer.period=20",
)


def test_training_from_scratch_and_writing_prompts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [SCRIPT, "--config-file", CONFIG, *SMALLER, f"train.output_dir={out}"]
    done = run_process([*command, "train.train_iter=60"], env=environment, cwd=PROJECTS)
    assert done.returncode == 0, done.stdout
    found = losses(out)
    assert list(found) == list(range(10, 61, 10))
    # Ids of 400 tokens: log 400 = 6.0 before anything is learned.
    assert 6.5 > found[10] > found[30] > found[60]
    assert perplexities(out)[60] < 200

    pipeline = ["projects/MagicPrompt/pipeline.py", "--model", str(out), "--max-new-tokens", "16"]
    written = run_process([*pipeline, "--prompt", "a cute pig"], env=environment, cwd=PROJECTS)
    assert written.returncode == 0, written.stdout
    lines = [line for line in written.stdout.splitlines() if line.startswith("a cute pig")]
    assert lines
    assert len(lines[0]) > len("a cute pig") + 8
