"""A tiny vocabulary and data set, and the training command as a user types it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from flow_train.checkpoint.folders import newest_checkpoint, read_checkpoint
from libai_projects.text import prepare
from tests.command_server import CommandServer
from tests.launch import REPOSITORY, run_distributed, run_process

PROJECTS = REPOSITORY / "libai_projects"
SCRIPT = "tools/train_net.py"
CONFIG = "projects/MagicPrompt/configs/gpt2_training.py"
REAL_PROMPTS = REPOSITORY.parent / "shared" / "data" / "sd_prompts" / "diffusiondb.train.txt"

TINY_MODEL = (
    "model.cfg.num_layers=2",
    "model.cfg.hidden_size=64",
    "model.cfg.ffn_hidden_size=128",
    "model.cfg.num_attention_heads=4",
    "model.cfg.max_seq_length=32",
)
# Six steps with checkpoints and evaluations after the third and the last.
TINY = (
    *TINY_MODEL,
    "graph.enabled=false",
    "optim.lr=3e-3",
    "train.train_epoch=0",
    "train.train_iter=6",
    "train.log_period=1",
    "train.checkpointer.period=3",
    "train.evaluation.eval_period=3",
    "train.evaluation.eval_iter=3",
    "dataloader.train.num_workers=0",
    "dataloader.train.splits=[[80,10,10]]",
)
NO_DROPOUT = (
    "model.cfg.embedding_dropout_prob=0",
    "model.cfg.attention_dropout_prob=0",
    "model.cfg.output_dropout_prob=0",
)


def _made_up_prompts(count: int) -> list[str]:
    draw = random.Random(0)
    words: list[Sequence[str]] = [
        ("a cute pig", "an old castle", "a portrait of a queen", "a city in the rain"),
        ("highly detailed", "digital painting", "oil on canvas", "concept art"),
        ("soft light", "dramatic lighting", "sharp focus", "8 k", "artstation"),
        # Names enough for a vocabulary of 400 tokens.
        [f"by {''.join(draw.choices('aeioubdfglmnprst', k=7))}" for _ in range(200)],
    ]
    return [", ".join(draw.choice(part) for part in words) for _ in range(count)]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that name a vocabulary of 400 tokens and a data set of 400 prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    if REAL_PROMPTS.exists():
        lines = REAL_PROMPTS.read_text(encoding="utf-8").splitlines()[:400]
    else:
        lines = _made_up_prompts(1500)
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        lines, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(folder))
    vocabulary = {
        "MAGICPROMPT_VOCAB": str(folder / "vocab.json"),
        "MAGICPROMPT_MERGES": str(folder / "merges.txt"),
    }
    code = prepare.main(
        [
            str(folder / "prompts.txt"),
            *("--output-prefix", str(folder / "data"), "--workers", "1"),
            *("--vocab-file", vocabulary["MAGICPROMPT_VOCAB"]),
            *("--merges-file", vocabulary["MAGICPROMPT_MERGES"]),
        ]
    )
    assert code == 0
    return {**vocabulary, "MAGICPROMPT_DATA": str(folder / "data")}


@pytest.fixture(scope="session")
def environment(prompts: dict[str, str]) -> dict[str, str]:
    """What a started command gets: our data, this Python first, one thread per process."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**prompts, "PATH": path, "ONEFLOW_ACCEL_THREADS": "1"}


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[CommandServer]:
    module = "libai_projects.tools.train_net"
    with CommandServer(module, forks=True, env=environment) as running:
        yield running


@pytest.fixture(scope="session")
def train(environment: dict[str, str], server: CommandServer) -> Run:
    """Runs train_net.py with the MagicPrompt config, a tiny model, and what the caller adds; in a
    process that was forked where that is enough."""

    def run(
        *args: str,
        out: Path,
        processes: int = 1,
        ok: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        args = ("--config-file", CONFIG, *TINY, f"train.output_dir={out}", *args)
        command, full = [SCRIPT, *args], {**environment, **(env or {})}
        if processes == 1 and env is None and "graph.enabled=true" not in args:
            result = server.run(args, cwd=PROJECTS)
        elif processes == 1:
            result = run_process(command, env=full, cwd=PROJECTS)
        else:
            result = run_distributed(command, processes, env=full, cwd=PROJECTS)
        assert (result.returncode == 0) == ok, result.stdout
        return result

    return run


@pytest.fixture(scope="session")
def whole_run(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, with the project's dropout."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(out=out)
    return out


def bash_command(processes: int, *args: str) -> list[str]:
    """tools/train.sh with the MagicPrompt config, through the Python that run_process starts."""
    command = ["bash", "tools/train.sh", SCRIPT, CONFIG, str(processes), *args]
    return ["-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *command]


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {line["iteration"]: line["total_loss"] for line in metrics(out) if "total_loss" in line}


def perplexities(out: Path) -> dict[int, float]:
    name = "validation/lm_loss_PPL"
    return {line["iteration"]: line[name] for line in metrics(out) if name in line}


def as_after_step_three(run: Path, target: Path) -> Path:
    """What the directory of a run held when its first checkpoint was whole."""
    target.mkdir()
    for name in ("checkpoints/step-00000003", "config.yaml", "metrics.json", "metrics.jsonl"):
        source = run / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / name)
    return target


def newest(out: Path) -> str:
    """The name of the checkpoint that was written last; it is whole."""
    folder = newest_checkpoint(out)
    assert read_checkpoint(folder).folder == folder
    return folder.name
