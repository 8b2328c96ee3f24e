"""Training BERT by the command: the order of sentences, a switch to dense layers, and going on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from flow_train.checkpoint.folders import read_checkpoint
from flow_train.compare.results import PERPLEXITY, read_results
from flow_train.metrics.log import read_metrics
from libai_projects import weights
from libai_projects.command.config import load_config
from libai_projects.configs import get_config
from libai_projects.text import prepare
from libai_projects.weights.bert import BERT
from tests.command_server import CommandServer
from tests.launch import run_distributed
from tests.libai_projects.train.conftest import (
    NO_DROPOUT,
    PROJECTS,
    SCRIPT,
    TINY,
    as_after_step_three,
    losses,
    perplexities,
)

CONFIG = "projects/BERT/configs/bert_pretraining.py"
BATCH = ("train.train_micro_batch_size=8", "train.num_accumulation_steps=1")
SMALL = (*TINY, *BATCH, "train.test_micro_batch_size=8", "dataloader.train.splits=[[1,0,0]]")
BLOCKS = ("model.cfg.mlp_cfg=blockdiag", "train.sparse_to_dense.fraction=0.5", *NO_DROPOUT)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two-sentence texts whose first words tell which sentence comes first."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def words() -> str:
        return " ".join(f"w{draw.integers(0, 30)}" for _ in range(draw.integers(2, 8)))

    lines = [f"first {words()}. then {words()}." for _ in range(600)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    options = ["--tokenizer", folder / "tokenizer.json", "--train-vocabulary", 100]
    options += ["--output-prefix", folder / "text", "--validation", 0.1, "--workers", 1]
    argv = [folder / "text.txt", *options, "--split-sentences", "--no-append-eod"]
    assert prepare.main([str(each) for each in argv]) == 0
    environment = {"BERT_DATA": folder / "text", "BERT_TOKENIZER": folder / "tokenizer.json"}
    return {name: str(value) for name, value in environment.items()}


@pytest.fixture(scope="module")
def train(data: dict[str, str]) -> Iterator[Run]:
    environment = {**data, "ONEFLOW_ACCEL_THREADS": "1"}
    with CommandServer("libai_projects.tools.train_net", forks=True, env=environment) as server:

        def run(*args: str, out: Path, processes: int = 1) -> subprocess.CompletedProcess[str]:
            args = ("--config-file", CONFIG, *SMALL, f"train.output_dir={out}", *args)
            if processes > 1:
                command = [SCRIPT, *args]
                result = run_distributed(command, processes, env=environment, cwd=PROJECTS)
            else:
                result = server.run(args, cwd=PROJECTS)
            assert result.returncode == 0, result.stdout
            return result

        yield run


def test_the_order_of_sentences_is_learned(train: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("train.train_iter=120", "train.evaluation.eval_period=60", "train.log_period=20")
    train(*more, "model.cfg.initializer_range=0.1", *NO_DROPOUT, out=out)
    found = read_metrics(out / "metrics.jsonl")
    evaluated = [line["values"] for line in found if line["split"] == "val"]
    assert evaluated[-1]["order_accuracy"] > 0.95
    values = [line["values"] for line in found if line["split"] == "train"]
    # Guessing costs log 2; the sum of both is what is trained by.
    assert values[-1]["sop_loss"] < 0.1 < 0.2 < values[0]["sop_loss"]
    assert values[-1]["lm_loss"] < values[0]["lm_loss"]
    total = values[-1]["lm_loss"] + values[-1]["sop_loss"]
    assert values[-1]["loss"] == pytest.approx(total, rel=1e-5)
    # Perplexity is of the masked tokens alone.
    assert values[-1]["perplexity"] == pytest.approx(np.exp(values[-1]["lm_loss"]), rel=1e-4)


@pytest.fixture(scope="module")
def switched(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Block-diagonal for three of six steps, dense from then on."""
    out = tmp_path_factory.mktemp("switched") / "out"
    train(*BLOCKS, out=out)
    return out


def test_layers_become_dense_and_compute_the_same(switched: Path) -> None:
    found = read_metrics(switched / "metrics.jsonl")
    (values,) = (line["values"] for line in found if line["split"] == "switch")
    assert values["loss_after"] == pytest.approx(values["loss_before"], abs=1e-6)
    assert losses(switched)[6] < losses(switched)[1]
    # What a study takes from it: each 64 x 128 matrix of blocks has a quarter of the numbers.
    results = read_results(switched / "metrics.jsonl")
    blocks, dense = (phase.parameters for phase in results.phases)
    assert (results.quality, results.epochs, results.switch_epoch) == (PERPLEXITY, (3, 6), 3)
    assert dense - blocks == 2 * 2 * 64 * 128 * 3 // 4
    assert results.phases[1].gmacs - results.phases[0].gmacs == pytest.approx(24_576e-9)
    assert 0 <= results.predicted <= 100
    configs = [
        weights.load(switched / "checkpoints" / f"step-0000000{step}", "libai", table=BERT)[1]
        for step in (3, 6)
    ]
    assert configs[0]["mlp_cfg"]["_target_"] == "monarch_flow.layers.BlockdiagLinear"
    assert "mlp_cfg" not in configs[1]


def test_weights_and_moments_are_carried_over(train: Run, switched: Path, tmp_path: Path) -> None:
    """After one step more a block's weights are near those before, and its moments are those
    before with one gradient added, which the other places have alone."""
    out = as_after_step_three(switched, tmp_path / "out")
    train(*BLOCKS, "--resume", "train.checkpointer.period=4", out=out)
    before = read_checkpoint(out / "checkpoints" / "step-00000003")
    after = read_checkpoint(out / "checkpoints" / "step-00000004")
    for layer, part in ((0, "dense_h_to_4h"), (1, "dense_4h_to_h")):
        name = f"layers.{layer}.mlp.{part}.weight"
        # (blocks, out, in) to the diagonal of (in, out).
        blocks, dense = before.model[name], after.model[name]
        count, outer, inner = blocks.shape
        there = np.zeros(dense.shape, bool)
        for number in range(count):
            rows = slice(number * inner, (number + 1) * inner)
            columns = slice(number * outer, (number + 1) * outer)
            there[rows, columns] = True
            # AdamW's step is at most about the rate.
            np.testing.assert_allclose(dense[rows, columns], blocks[number].T, rtol=0, atol=3e-3)
        assert 0 < np.abs(dense[~there]).max() < 3e-3 < blocks.std()
        first, second = (
            before.optimizer[f"{key}/{name}"].transpose(0, 2, 1).ravel().astype(np.float64)
            for key in ("exp_avg", "exp_avg_sq")
        )
        # What both moments gain is of one gradient (Kingma and Ba 2015, algorithm 1); a second
        # moment below the square of the first was raised to it.
        gradient = (after.optimizer[f"exp_avg/{name}"][there] - 0.9 * first) / 0.1
        gained = after.optimizer[f"exp_avg_sq/{name}"][there] - 0.999 * np.maximum(second, first**2)
        squared = 0.001 * gradient**2
        equal = np.isclose(gained, squared, rtol=1e-2, atol=1e-3 * squared.max())
        assert squared.any()
        assert equal.mean() > 0.95
        assert after.optimizer[f"exp_avg/{name}"][~there].all()


@pytest.mark.release
def test_the_switch_under_nn_graph_and_tensor_parallelism(
    train: Run, switched: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(*BLOCKS, "graph.enabled=true", "train.dist.tensor_parallel_size=2", out=out, processes=2)
    assert losses(out) == pytest.approx(losses(switched), rel=1e-5)
    assert perplexities(out) == pytest.approx(perplexities(switched), rel=1e-5)


def test_parameters_of_base_and_large_are_those_of_transformers() -> None:
    """BertForPreTraining of bert-base-uncased's and bert-large-uncased's config.json."""
    base = OmegaConf.to_container(get_config("common/models/bert.py").cfg) | {"vocab_size": 30522}
    assert BERT.count(base) == 110_106_428
    large = load_config(str(PROJECTS / "projects/BERT/configs/bert_large_pretraining.py"))
    sizes = OmegaConf.to_container(large.model.cfg) | {"vocab_size": 30522}
    assert BERT.count(sizes) == 336_226_108
