"""The recipe of ViTAE, ../shared/docs/vitae_spec.md, section 4.1, and its variants."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf

from flow_train.optim import build_schedule
from monarch_flow import train
from monarch_flow.config import COMPOSER, CONFIGS, compose
from monarch_flow.engine.run import run
from tests.monarch_flow.configs.composed import composed

TINY = "imagenet/vitae/tiny"


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """Sets the number of processes that the launcher is said to have started; at first 1."""
    for name in ("DATA_DIR", "RESULT_DIR", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def start(number):
        monkeypatch.setenv("WORLD_SIZE", str(number))

    start(1)
    return start


@pytest.mark.parametrize(
    ("number", "overrides", "images", "rate", "decay"),
    [
        (1, [], 128, 2.5e-4, 0.99996**0.25),
        (8, [], 1024, 2e-3, 0.99996**2),
        (1, ["train.global_batch_size=512"], 512, 1e-3, 0.99996),
        (2, ["datamodule.batch_size=64", "train.lr_base=5e-4"], 128, 1.25e-4, 0.99996**0.25),
        (1, ["train.lr_base_size=256", "callbacks.ema.decay=0.9"], 128, 5e-4, 0.9),
    ],
)
def test_learning_rate_and_average_follow_the_images_of_a_step(
    processes, number, overrides, images, rate, decay
):
    processes(number)
    cfg = composed(TINY, *overrides)
    assert cfg.train.global_batch_size == images
    assert cfg.optimizer.lr == pytest.approx(rate, rel=1e-12)
    assert cfg.callbacks.ema.decay == pytest.approx(decay, rel=1e-12)
    # Below 512 images the released code's exponent is 0, its decay 1.
    assert cfg.callbacks.ema.decay < 1
    batches = cfg.trainer.accumulate_grad_batches * number
    assert batches * cfg.datamodule.batch_size == images


def test_learning_rates_of_a_published_log():
    """One GPU, 128 images: "LR: 1.000e-06" in epoch 0, and so on."""
    cfg = composed(TINY)
    schedule = build_schedule(cfg.scheduler, cfg.optimizer.lr)
    logged = {0: "1.000e-06", 1: "2.590e-05", 8: "2.002e-04", 15: "2.485e-04"}
    assert {epoch: f"{schedule(epoch):.3e}" for epoch in logged} == logged
    assert schedule(300) == schedule(309) == 1e-5


def test_either_key_says_what_the_learning_rate_is(tmp_path):
    cfg = composed(TINY, "optimizer.lr=3e-4")
    assert (cfg.optimizer.lr, cfg.train.lr_base) == (3e-4, None)
    cfg = composed("imagenet/vit/vit-s", "train.lr_base=1e-3")
    assert (cfg.optimizer.lr, cfg.train.lr_base) == (2e-3, 1e-3)
    cfg = composed(TINY, "train.lr_base=null", "optimizer.lr=1e-4")
    assert (cfg.optimizer.lr, cfg.train.lr_base) == (1e-4, None)

    with pytest.raises(UserError, match="only one can say"):
        composed("mnist/vit", "optimizer.lr=3e-4", "train.lr_base=1e-3")
    with pytest.raises(UserError, match=r"train\.lr_base is null: give it, or optimizer\.lr=VALUE"):
        composed(TINY, "train.lr_base=null")
    with pytest.raises(UserError) as caught:
        composed(TINY, "train.lr_base=fast")
    assert str(caught.value) == "train.lr_base='fast': it must be a number above 0 or null"
    # A file that builds on the recipe would leave a base behind that nothing reads.
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [/experiment/{TINY}, _self_]\noptimizer: {{lr: 5e-4}}\n"
    )
    with pytest.raises(UserError, match=r"or train\.lr_base: null"):
        compose(["experiment=mine"], config_dir=str(tmp_path))


def differences(first, second):
    flat = []
    for cfg in (first, second):
        values = OmegaConf.to_container(cfg)
        del values["name"], values["run_dir"]
        flat.append(dict(leaves(values)))
    keys = flat[0].keys() | flat[1].keys()
    return {key for key in keys if flat[0].get(key) != flat[1].get(key)}


def leaves(values, prefix=""):
    for key, value in values.items():
        # A layer's mapping counts as one value.
        if isinstance(value, dict) and key != "mlp_cfg":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("dense", [TINY, "mnist/vitae-tiny"])
def test_variants_differ_in_what_they_are_about(dense):
    monarch = composed(f"{dense}-monarch")
    assert differences(composed(dense), monarch) == {"model.mlp_cfg"}
    assert monarch.model.mlp_cfg.linear1_cfg.nblocks == 4
    later = composed(f"{dense}-s2d")
    assert differences(monarch, later) == {"train.sparse_to_dense.fraction"}
    assert later.train.sparse_to_dense.fraction == 0.7
    projected = composed(f"{dense}-d2s")
    assert projected.train.init_from.project is True
    assert {key.split(".")[0] for key in differences(monarch, projected)} == {
        "train",
        "optimizer",
        "scheduler",
        "trainer",
    }
    assert projected.trainer.max_epochs < monarch.trainer.max_epochs


def test_each_size_has_a_recipe_and_a_model():
    """Each recipe is composed in test_config_compose.py."""
    names = {
        "tiny": "Tiny",
        "6m": "6M",
        "13m": "13M",
        "small": "Small",
        "base": "Base",
        "large": "Large",
        "huge": "Huge",
    }
    groups = COMPOSER.groups()
    assert set(groups.options("model/vitaemodel")) == set(names)
    assert {f"imagenet/vitae/{option}" for option in names} <= set(groups.options("experiment"))
    for option, name in names.items():
        chosen = OmegaConf.load(CONFIGS / "model" / "vitaemodel" / f"{option}.yaml")
        assert chosen.name == f"ViTAE_basic_{name}"
    assert composed("imagenet/vitae/small-monarch").model.name == "ViTAE_basic_Small"


def test_a_recipe_for_cpus_trains(tmp_path):
    small = ("datamodule=synthetic", "datamodule.num_images=8", "datamodule.num_classes=5")
    small += ("train.global_batch_size=4", "datamodule.image_size=32", f"work_dir={tmp_path}")
    metrics = run(composed("flowers5/vitae-tiny-monarch", "mode=debug", *small))
    # Of a guess it is ln(classes).
    assert metrics["train/loss"] < 4
    assert metrics["val/loss"] < 4


def test_help_of_an_experiment_shows_what_is_scaled(capsys):
    assert train.main(["--help", f"experiment={TINY}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert ["optimizer.lr=", "${scaled_lr:}"] in [line.split() for line in lines]
    assert any(line.split()[:2] == ["train.lr_base=", "0.001"] for line in lines)
