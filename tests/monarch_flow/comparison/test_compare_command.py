"""python -m monarch_flow.compare: which runs it starts, with what, and what is left of them."""

from __future__ import annotations

import csv
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from flow_train.compare.process import Ended
from flow_train.compare.results import read_results
from flow_train.metrics.log import metric_series, read_metrics
from monarch_flow import compare, train
from monarch_flow.compare import STUDIES
from monarch_flow.config import compose
from tests.launch import REPOSITORY
from tests.monarch_flow.comparison.logs import write_log
from tests.monarch_flow.engine.engine_runs import draw_digits

# A ViT and 4 epochs of 3 batches that take a second.
TINY = (
    "trainer.max_epochs=4",
    "trainer.limit_train_batches=3",
    "trainer.log_every_n_steps=1",
    "train.global_batch_size=16",
    "datamodule.num_workers=0",
    "datamodule.val_split=64",
    "model={patch_size: 7, embed_dim: 32, depth: 1, num_heads: 2}",
    "optimizer.lr=3e-3",
)
A = {"name": "a", "experiment": "mnist/vit"}
ROWS = ("dense", "monarch", "block-diagonal", "sparse-to-dense", "projected")


@pytest.fixture(autouse=True)
def _environment(monkeypatch, caplog):
    for name in ("WORLD_SIZE", "RANK", "DATA_DIR", "RESULT_DIR"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.WARNING, logger="oneflow_accel")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return draw_digits(tmp_path_factory.mktemp("digits"))


class Runs:
    """Stands for the processes: trains for real, pretends to, or fails."""

    def __init__(self, how):
        self.how = how
        self.started: list[str] = []

    def __call__(self, arguments, folder):
        self.started.append(folder.name)
        return self.how(arguments, folder)


def in_this_process(arguments, folder):
    return Ended(train.main(arguments))


def pretend(arguments, folder):
    write_log(folder, [50, 60], tested=61)
    return Ended(0)


def study_file(folder: Path, *rows, **keys) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"title": "Mine", "rows": list(rows), **keys}))
    return str(path)


@pytest.fixture
def arguments(digits, tmp_path):
    return (f"datamodule.data_dir={digits}", f"work_dir={tmp_path / 'runs'}", *TINY)


def test_a_study_of_real_runs(arguments, tmp_path, capsys):
    runs = Runs(in_this_process)
    assert compare.main(["mnist-vit", *arguments], runs) == 0
    assert tuple(runs.started) == ROWS
    folder = tmp_path / "runs/studies/mnist-vit"
    found = {name: read_results(folder / name / "metrics.jsonl") for name in ROWS}
    page = (folder / "comparison.md").read_text()
    assert page in capsys.readouterr().out
    assert (folder / "comparison.png").stat().st_size > 10_000
    for name, results in found.items():
        assert f"| {name} | {results.tested:.2f} % | {results.last:.2f} % | " in page
    # patches 7 x 7 -> 32, 16 tokens and a class token; one block; the head.
    attention, norms = 4 * 32 * 33, 3 * 2 * 32
    dense = 50 * 32 + 18 * 32 + attention + norms + 32 * 128 * 2 + 160 + 10 * 33
    monarch = dense - 2 * 32 * 128 + 2 * (32 * 8 + 128 * 8)
    counts = {name: [p.parameters for p in found[name].phases] for name in ROWS}
    assert counts == {
        "dense": [dense],
        "monarch": [monarch],
        "block-diagonal": [dense - 2 * 32 * 128 * 3 // 4],
        "sparse-to-dense": [monarch, dense],
        "projected": [monarch],
    }
    assert f"{monarch:,}, then {dense:,}" in page
    assert all(p.rate > 0 for results in found.values() for p in results.phases)

    # The accuracy before the first step is that of the projected weights, by themselves.
    projected = found["projected"]
    assert f"{projected.initial:.2f} %" in page
    assert projected.epochs[0] == 0
    assert [results.initial for results in found.values()].count(None) == 4
    lines = read_metrics(folder / "projected/metrics.jsonl")
    assert metric_series(lines, "val", "acc1")[0].tolist() == [0, 3, 6, 9, 12]
    # It began with the best weights of the dense run.
    saved = OmegaConf.load(folder / "projected/config.yaml")
    assert saved.train.init_from.path == str(folder / "dense")

    # Another value is refused; not so one that changes nothing, and a key that is new since then.
    saved = OmegaConf.load(folder / "dense/config.yaml")
    del saved.trainer.graph
    OmegaConf.save(saved, folder / "dense/config.yaml")
    changed = ("datamodule.num_workers=1", "optimizer.lr=1e-3")
    assert compare.main(["mnist-vit", *arguments, *changed], runs) == 2
    assert tuple(runs.started) == ROWS
    error = capsys.readouterr().err
    assert "dense: " in error
    assert "other values: optimizer.lr is 0.001, and 0.003 there. " in error
    assert "work_dir=DIR" in error


def test_a_failure_is_named_and_the_others_are_kept(arguments, tmp_path, capsys):
    def fail_dense(texts, folder):
        return Ended(2) if folder.name == "dense" else pretend(texts, folder)

    study = study_file(
        tmp_path,
        {"name": "dense", "experiment": "mnist/vit"},
        {"name": "projected", "experiment": "mnist/vit-monarch-d2s", "init_from": "dense"},
        {"name": "monarch", "experiment": "mnist/vit-monarch"},
    )
    folder = tmp_path / "runs/studies/mine"
    first = Runs(fail_dense)
    assert compare.main([study, *arguments], first) == 1
    assert first.started == ["dense", "monarch"]
    page = (folder / "comparison.md").read_text()
    assert re.search(r"\| dense \|.*\| failed: exit code 2 \|", page)
    assert re.search(r"\| projected \|.*\| not run: it needs dense \|", page)
    assert re.search(r"\| monarch \| 61.00 % \|.*\| done \|", page)
    error = capsys.readouterr().err
    assert "dense failed: exit code 2" in error
    assert "projected not run: it needs dense" in error
    # A run that ended although this command did not see it.
    (folder / "monarch/finished.json").unlink()
    # Only what is left.
    second = Runs(pretend)
    assert compare.main([study, *arguments], second) == 0
    assert second.started == ["dense", "projected"]
    page = (folder / "comparison.md").read_text()
    assert "state" not in page
    assert "failed" not in page


def test_each_row_runs_with_each_seed(arguments, tmp_path):
    rows = [A, {**A, "name": "b", "init_from": "a"}]
    study = study_file(tmp_path, *rows, seeds=[5])
    runs = Runs(pretend)
    assert compare.main([study, "seeds=3,4", *arguments], runs) == 0
    assert runs.started == ["a-seed3", "a-seed4", "b-seed3", "b-seed4"]
    (last,) = STUDIES.plan(STUDIES.read(study), arguments[:1])[1:]
    cfg = compose(list(last.arguments))
    assert (cfg.seed, Path(cfg.train.init_from.path).name) == (5, "a-seed5")
    folder = tmp_path / "runs/studies/mine"
    table = list(csv.reader((folder / "comparison.csv").open()))
    assert [line[:3] for line in table[1:]] == [
        [name, seed, "61.0"] for name in "ab" for seed in "34"
    ]
    assert "a & 61.00 $\\pm$ 0.00" in (folder / "comparison.tex").read_text()


def test_an_interrupt_ends_the_study(arguments, tmp_path, capsys):
    def stop(texts, folder):
        return Ended(143, told_to_stop=True)

    runs = Runs(stop)
    rows = [{"name": name, "experiment": "mnist/vit"} for name in ("first", "second")]
    assert compare.main([study_file(tmp_path, *rows), *arguments], runs) == 130
    assert runs.started == ["first"]
    page = (tmp_path / "runs/studies/mine/comparison.md").read_text()
    assert "\n| first | interrupted |\n| second | to do |\n\nThe runs:\n" in page
    assert "the same command goes on" in capsys.readouterr().err


def test_a_process_of_its_own_is_stopped_and_goes_on(arguments, tmp_path):
    """SIGTERM reaches the run, which writes a checkpoint; the second command goes on from there."""
    study = study_file(tmp_path, {"name": "only", "experiment": "mnist/vit"})
    # Later keys win.
    long = ("trainer.max_epochs=200", "trainer.limit_train_batches=8", "test_after_training=false")
    folder = tmp_path / "runs/studies/mine"
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch_flow.compare", study, *arguments, *long],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "only/checkpoints/latest").is_file():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "told to stop (SIGTERM)" in output
    assert "interrupted; the same command goes on" in output
    assert "told to stop (SIGTERM)" in (folder / "only/output.txt").read_text()
    lines = read_metrics(folder / "only/metrics.jsonl")
    done = int(metric_series(lines, "train", "loss")[0][-1])
    assert 8 <= done < 1600
    # As much again and no more, by hand: the schedule is the same.
    resumed = ["resume=auto", f"trainer.max_steps={done + 1}"]
    texts = ["experiment=mnist/vit", *arguments, *long, f"run_dir={folder / 'only'}", *resumed]
    assert train.main(texts) == 0
    steps = metric_series(read_metrics(folder / "only/metrics.jsonl"), "train", "loss")[0]
    assert steps[-1] == done + 1
    assert len(set(steps.tolist())) == len(steps)


def test_a_study_is_planned_before_it_runs(digits):
    study = "flowers5-vitae"
    runs = STUDIES.plan(STUDIES.read(study), [f"datamodule.data_dir={digits}"])
    assert [run.row.name for run in runs] == [name for name in ROWS if name != "block-diagonal"]
    cfgs = [compose(list(run.arguments)) for run in runs]
    for run, cfg in zip(runs, cfgs, strict=True):
        assert cfg.resume == "auto"
        assert cfg.name == f"{study}-{run.row.name}"
        assert run.folder == Path("runs/studies") / study / run.row.name
    dense, monarch, sparse_to_dense, projected = cfgs
    assert [cfg.model.mlp_cfg is None for cfg in (dense, monarch)] == [True, False]
    assert {cfg.model.name for cfg in (dense, monarch, sparse_to_dense, projected)} == {
        dense.model.name
    }
    assert sparse_to_dense.train.sparse_to_dense.fraction == 0.7
    source = projected.train.init_from
    assert (source.path, source.project) == (dense.run_dir, True)
    assert projected.callbacks.initial_validation is not None


def test_a_study_and_an_experiment_of_ones_own(tmp_path, digits, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "study").mkdir()
    text = "# @package _global_\ndefaults: [/experiment/mnist/vit, _self_]\nseed: 7\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    keys = {"overrides": ["seed=8", "optimizer.lr=1e-2"]}
    rows = [{"name": "a", "experiment": "mine"}]
    rows.append({"name": "b", "experiment": "mine", "overrides": ["optimizer.lr=1e-4"]})
    study_file(tmp_path / "study", *rows, **keys)
    flags = ["--config-dir", str(tmp_path), "--cfg", "job"]
    assert compare.main(["mine", f"datamodule.data_dir={digits}", "seed=9", *flags]) == 0
    first, second = map(shlex.split, capsys.readouterr().out.splitlines())
    cfgs = [compose(words[5:], str(tmp_path)) for words in (first, second)]
    assert first[3:5] == ["--config-dir", str(tmp_path)]
    # The command line wins over a row, and a row over its study.
    assert [cfg.seed for cfg in cfgs] == [9, 9]
    assert [cfg.optimizer.lr for cfg in cfgs] == [1e-2, 1e-4]


@pytest.mark.parametrize(
    ("rows", "overrides", "words"),
    [
        ([A], ["experiment=mnist/vit"], ["a: experiment=mnist/vit", "rows name them"]),
        ([A], ["run_dir=x"], ["run_dir=x", "work_dir=DIR"]),
        ([A], ["mode=smoke"], ["mode=smoke", "whole ones"]),
        ([{**A, "experiment": "mnist/vti"}], [], ["did you mean mnist/vit"]),
        ([], [], ["rows"]),
        ([A, A], [], ["rows.1.name", "there is a row a above"]),
        ([{**A, "init_from": "b"}], [], ["rows.0.init_from=b", "no such row above"]),
        ([{**A, "name": "../a"}], [], ["rows.0.name=../a", "folder"]),
        ([A], ["seeds=1,two"], ["seeds=1,two: whole numbers"]),
        ([A], ["seeds=1,2", "seed=3"], ["seed=3", "the study's seeds are [1, 2]"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    rows, overrides, words, arguments, tmp_path, capsys
):
    runs = Runs(pretend)
    texts = [study_file(tmp_path, *rows), *arguments[:2], *overrides]
    assert compare.main(texts, runs) == 2
    error = capsys.readouterr().err
    assert error.startswith("monarch_flow.compare: error: ")
    for word in words:
        assert word in error, error
    assert not runs.started


def test_help_and_mistakes_in_the_name_of_a_study(tmp_path, capsys, monkeypatch):
    assert compare.main(["--help"]) == 0
    assert "A small ViT on MNIST" in capsys.readouterr().out
    assert compare.main(["mnist/vit"]) == 2
    assert "did you mean mnist-vit?" in capsys.readouterr().err
    assert compare.main([]) == 2
    assert "mnist-vit" in capsys.readouterr().err
    assert compare.main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err
    (tmp_path / "wrong.yaml").write_text("rows: [")
    assert compare.main([str(tmp_path / "wrong.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    # Without its data nothing begins.
    assert compare.main(["mnist-vit", f"work_dir={tmp_path}"]) == 2
    assert "datamodule.data_dir=DIR" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare.main(["mnist-vit"]) == 2
    assert "launcher" in capsys.readouterr().err
