"""Experiments compose to the values of the specification, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from flow_train.data.mixup import build_mixup
from flow_train.optim import build_loss, build_schedule
from monarch_flow.config import COMPOSER, CONFIGS
from monarch_flow.models import default_config
from tests.monarch_flow.configs.composed import MONARCH, composed, plain

EXPERIMENTS = COMPOSER.groups().options("experiment")
# What the specification says of some of them.
FILE = Path(__file__).with_name("experiments.yaml")
SPECIFIED = yaml.safe_load(FILE.read_text())


def specified(experiment):
    entry = SPECIFIED[experiment]
    values = specified(entry["like"]) if "like" in entry else {}
    for key in entry.get("without", ()):
        del values[key]
    return values | entry.get("keys", {})


@pytest.mark.parametrize("experiment", SPECIFIED)
def test_experiment_has_the_values_of_the_specification(experiment, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(SPECIFIED[experiment].get("processes", 8)))
    cfg = composed(experiment)
    wanted = specified(experiment)
    assert {key: plain(cfg, key) for key in wanted} == wanted


@pytest.mark.parametrize("data", ["mnist", "flowers5"])
def test_cpu_twins_differ_in_their_layers_only(data):
    dense = OmegaConf.to_container(composed(f"{data}/vit"))
    monarch = OmegaConf.to_container(composed(f"{data}/vit-monarch"))
    assert monarch["model"]["mlp_cfg"] == MONARCH
    for cfg in (dense, monarch):
        del cfg["name"], cfg["run_dir"]
        cfg["model"]["mlp_cfg"] = None
    assert dense == monarch


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_says_how_it_is_run(experiment, monkeypatch):
    monkeypatch.delenv("RESULT_DIR", raising=False)
    processes = SPECIFIED[experiment].get("processes", 8) if experiment in SPECIFIED else 1
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    cfg = composed(experiment)
    name = experiment.replace("/", "-")
    assert cfg.name == name
    assert cfg.run_dir == f"runs/{name}"
    batches = cfg.trainer.accumulate_grad_batches * cfg.trainer.devices
    assert batches * cfg.datamodule.batch_size == cfg.train.global_batch_size or cfg.mode == "eval"
    assert not OmegaConf.missing_keys(cfg)
    # What is to read these groups knows their keys.
    build_schedule(cfg.scheduler, cfg.optimizer.lr)
    build_loss(cfg.train.loss_fn)
    build_mixup(cfg.datamodule.mixup, 10)
    given = {key for key, value in cfg.model.items() if value is not None}
    assert given <= {"name", *default_config(cfg.model.name)}

    header = (CONFIGS / "experiment" / f"{experiment}.yaml").read_text().split("\n\n")[0]
    assert f"python -m monarch_flow.train experiment={experiment} " in header
    for word in ("hardware", "time", "expected"):
        assert word in header, word


def test_learning_rate_of_the_composed_schedule():
    """The table of section 4.6."""
    cfg = composed("imagenet/vit/vit-s")
    schedule = build_schedule(cfg.scheduler, cfg.optimizer.lr)
    table = {
        0: 1e-6,
        1: 1.009e-4,
        5: 5.005e-4,
        9: 9.001e-4,
        10: 9.97288e-4,
        50: 9.33683e-4,
        150: 5.05e-4,
        250: 7.6317e-5,
        299: 1.00271e-5,
        300: 1e-5,
        309: 1e-5,
    }
    # As many digits as the table has.
    assert [schedule(epoch) for epoch in table] == pytest.approx(list(table.values()), rel=1e-5)
    assert cfg.trainer.max_epochs == 310


def test_global_batch_stays_the_same_on_any_number_of_processes(monkeypatch):
    for processes, batches in ((1, 8), (2, 4), (4, 2), (8, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        cfg = composed("imagenet/vit/vit-s")
        assert cfg.trainer.devices == processes
        assert cfg.trainer.accumulate_grad_batches == batches
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert composed("mnist/vit").datamodule.batch_size == 32
