"""python -m libai_projects.compare: which runs it starts, and what it makes of their logs."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from flow_train.compare.process import Ended
from flow_train.metrics.log import RunLog
from libai_projects import compare
from tests.libai_projects.train.conftest import PROJECTS

CONFIG = str(PROJECTS / "projects/BERT/configs/bert_small_cpu.py")
# Perplexity and share of right tokens at steps 10, 20 and 30, and seconds of a step.
RUNS = {
    "dense-seed1": ((300, 0.1), (200, 0.2), (100, 0.3), 2.0),
    "dense-seed2": ((300, 0.1), (200, 0.2), (110, 0.28), 2.0),
    "blocks-seed1": ((310, 0.1), (150, 0.25), (160, 0.2), 1.0),
    "blocks-seed2": ((310, 0.1), (150, 0.25), (160, 0.2), 1.0),
}


def pretend(arguments: Sequence[str], folder: Path) -> Ended:
    *validated, seconds = RUNS.get(folder.name, RUNS["dense-seed1"])
    log = RunLog(folder)
    log.log(0, {"params_trainable": 4e6, "gmacs": 0.002}, split="model")
    for step, (perplexity, right) in zip((10, 20, 30), validated, strict=True):
        values = {"loss": 1.0, "perplexity": 90.0, "tokens_per_second": 1000 / seconds}
        log.log(step, {**values, "step_seconds": seconds, "data_seconds": 0.0, "epoch": step / 30})
        log.log(step, {"perplexity": perplexity, "accuracy": right}, split="val")
    log.close()
    return Ended(0)


@pytest.fixture
def study(tmp_path: Path) -> str:
    rows = [
        {"name": "dense", "experiment": CONFIG},
        {"name": "blocks", "experiment": CONFIG, "overrides": ["model.cfg.mlp_cfg=blockdiag"]},
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"title": "Mine", "rows": rows}))
    return str(path)


def test_perplexity_at_equal_steps_and_at_equal_time(study: str, tmp_path: Path) -> None:
    argv = [study, "seeds=1,2", "optim.lr=1e-3", f"--output-dir={tmp_path}"]
    started = []

    def train(arguments: Sequence[str], folder: Path) -> Ended:
        started.append(tuple(arguments))
        return pretend(arguments, folder)

    assert compare.main(argv, train) == 0
    assert [each[0] for each in started] == [CONFIG] * 4
    last = ("model.cfg.mlp_cfg=blockdiag", "optim.lr=1e-3", "train.seed=2")
    assert started[3][1:] == (*last, f"train.output_dir={tmp_path}/mine/blocks-seed2", "--resume")
    page = (tmp_path / "mine/comparison.md").read_text()
    head, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    cells = [dict(zip(head.split(" | "), row.split(" | "), strict=True)) for row in rows]
    # The blocks had 30 s; the dense model's 10 first steps took 20, its 20 first 40.
    told = [[row[name] for name in ("perplexity", "after 30 s", "right tokens")] for row in cells]
    assert told == [
        ["105.00 ± 7.07", "250.00 ± 0.00", "29.00 ± 1.41 %"],
        ["150.00 ± 0.00", "160.00 ± 0.00", "25.00 ± 0.00 %"],
    ]
    assert "training tokens/s" in head
    assert "Perplexity is of the tokens on the validation tokens, with the weights of the" in page
    assert (tmp_path / "mine/comparison.png").stat().st_size > 10_000
    with (tmp_path / "mine/comparison.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["perplexity_after_30_seconds"] for row in found] == ["250.0"] * 2 + ["160.0"] * 2
    # Done is done.
    assert compare.main(argv, train) == 0
    assert len(started) == 4


@pytest.mark.parametrize("project", ["BERT", "MagicPrompt", "Llama"])
def test_studies_of_the_projects(
    project: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(PROJECTS)
    argv = [f"projects/{project}/study.yaml", "seeds=1", f"--output-dir={tmp_path}"]
    assert compare.main(argv, pretend) == 0
    assert "| dense | 100.00 | 100.00 | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optim.lrr=1"], "dense: .* has no key optim.lrr; did you mean optim.lr"),
        (["seeds=1,x"], "seeds=1,x: whole numbers, such as seeds=1,2,3"),
        (["optim.lr=2e-3"], r"dense: .*dense holds a run with other values \(.*\)\. Remove that"),
    ],
)
def test_what_cannot_be_is_said_before_a_run(
    changes: list[str], words: str, study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "mine/dense/arguments.json"
    begun.parent.mkdir(parents=True)
    begun.write_text(f'{{"arguments": ["{CONFIG}"]}}')
    assert compare.main([study, f"--output-dir={tmp_path}", *changes], pretend) == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error
