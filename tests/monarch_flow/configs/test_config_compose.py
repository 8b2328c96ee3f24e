"""Experiments compose to the values of ../shared/docs/monarch_spec.md, section 4.6, key by key."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from flow_train.data.mixup import build_mixup
from flow_train.optim import build_loss, build_schedule
from monarch_flow.config import COMPOSER, CONFIGS
from monarch_flow.models import default_config
from tests.monarch_flow.configs.composed import MONARCH, composed, plain

EXPERIMENTS = COMPOSER.groups().options("experiment")
VIT_S = {
    "seed": 1111,
    "mode": "default",
    "resume": None,
    "test_after_training": True,
    "model.name": "vit_small_patch16_224",
    "model.img_size": 224,
    "model.drop_rate": 0.0,
    "model.drop_path_rate": 0.1,
    "model.mlp_cfg": None,
    "model.attnlinear_cfg": None,
    "trainer.accelerator": None,
    "trainer.devices": 8,
    "trainer.precision": 16,
    "trainer.min_epochs": 1,
    "trainer.max_epochs": 310,
    "trainer.accumulate_grad_batches": 1,
    "trainer.gradient_clip_val": None,
    "train.global_batch_size": 1024,
    "train.loss_fn": {"name": "cross_entropy", "label_smoothing": 0.1},
    "train.loss_fn_val": {"name": "cross_entropy", "label_smoothing": 0.0},
    "train.scheduler_interval": "epoch",
    "train.sparse_to_dense.fraction": None,
    "train.init_from.path": None,
    "train.init_from.project": False,
    "optimizer": {
        "name": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.05,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    },
    "optimizer_param_grouping": {"bias_weight_decay": False, "normalization_weight_decay": False},
    "scheduler": {
        "name": "cosine",
        "t_initial": 300,
        "lr_min": 1e-5,
        "warmup_t": 10,
        "warmup_lr_init": 1e-6,
        "warmup_prefix": False,
        "cycle_limit": 1,
        "cooldown": 10,
    },
    "datamodule.dataset": "folder",
    "datamodule.batch_size": 128,
    "datamodule.batch_size_eval": 256,
    "datamodule.num_workers": 8,
    "datamodule.pin_memory": True,
    "datamodule.shuffle": True,
    "datamodule.image_size": 224,
    "datamodule.num_aug_repeats": 0,
    "datamodule.mean": [0.485, 0.456, 0.406],
    "datamodule.std": [0.229, 0.224, 0.225],
    "datamodule.train_transforms.auto_augment": "rand-m9-mstd0.5-inc1",
    "datamodule.train_transforms.interpolation": "random",
    "datamodule.train_transforms.re_prob": 0.25,
    "datamodule.train_transforms.re_mode": "pixel",
    "datamodule.train_transforms.re_count": 1,
    "datamodule.train_transforms.scale": [0.08, 1.0],
    "datamodule.train_transforms.ratio": [3 / 4, 4 / 3],
    "datamodule.train_transforms.hflip": 0.5,
    "datamodule.train_transforms.color_jitter": None,
    "datamodule.val_transforms.interpolation": "bicubic",
    "datamodule.val_transforms.crop_pct": 0.9,
    "datamodule.test_transforms.interpolation": "bicubic",
    "datamodule.test_transforms.crop_pct": 0.9,
    "datamodule.mixup.mixup_alpha": 0.8,
    "datamodule.mixup.cutmix_alpha": 1.0,
    "datamodule.mixup.prob": 1.0,
    "datamodule.mixup.switch_prob": 0.5,
    "datamodule.mixup.mode": "batch",
    "datamodule.mixup.label_smoothing": 0.0,
    "callbacks.model_checkpoint": {
        "monitor": "val/acc",
        "mode": "max",
        "save_top_k": 1,
        "save_last": True,
        "every_n_train_steps": 0,
        "every_n_epochs": 1,
    },
    "callbacks.early_stopping": {
        "monitor": "val/acc",
        "mode": "max",
        "patience": 100,
        "min_delta": 0.0,
        "max_minutes": None,
    },
    "callbacks.learning_rate_monitor.logging_interval": "step",
    "callbacks.speed_monitor.intra_step_time": True,
    "callbacks.params_log.total_params_log": True,
    "callbacks.ema": None,
    "logger.tensorboard": {},
    "logger.wandb": None,
    "eval.ckpt": None,
    "eval.run_val": True,
    "eval.run_test": True,
}
STRUCTURED = {"model.drop_path_rate": 0.0}
VIT_S_MONARCH = {**VIT_S, **STRUCTURED, "model.mlp_cfg": MONARCH}
T2T_7 = {
    **VIT_S,
    "model.name": "t2t_vit_7",
    "trainer.precision": 32,
    "train.global_batch_size": 512,
    "datamodule.batch_size": 64,
    "datamodule.batch_size_eval": 128,
    "optimizer.weight_decay": 0.03,
    "optimizer.lr": 1e-3,
    "callbacks.ema": {"decay": 0.99996, "use_num_updates": False},
}
del T2T_7["optimizer"]
T2T_14 = {**T2T_7, "model.name": "t2t_vit_14", "optimizer.lr": 5e-4, "optimizer.weight_decay": 0.05}
T2T_14T = {**T2T_14, "model.name": "t2t_vit_t_14", "trainer.precision": 16}
MIXER_S = {
    "seed": 1111,
    "model.name": "mixer_s16_224",
    "model.img_size": 224,
    "model.drop_rate": 0.0,
    "model.drop_path_rate": 0.1,
    "model.mlp_cfg": None,
    "trainer.precision": 16,
    "trainer.gradient_clip_val": 1.0,
    "trainer.max_epochs": 310,
    "trainer.accumulate_grad_batches": 1,
    "train.global_batch_size": 4096,
    "train.loss_fn.label_smoothing": 0.1,
    "optimizer.lr": 2e-3,
    "optimizer.weight_decay": 0.1,
    "scheduler.t_initial": 300,
    "scheduler.lr_min": 1e-5,
    "scheduler.warmup_t": 10,
    "scheduler.warmup_lr_init": 1e-4,
    "scheduler.cooldown": 10,
    "datamodule.batch_size": 512,
    "datamodule.batch_size_eval": 1024,
    "datamodule.train_transforms.auto_augment": "rand-m15-n2",
    "datamodule.train_transforms.re_prob": 0.0,
    "datamodule.val_transforms.crop_pct": 0.875,
    "datamodule.mixup.mixup_alpha": 0.5,
    "datamodule.mixup.cutmix_alpha": 0.0,
    "datamodule.mixup.label_smoothing": 0.0,
    "callbacks.ema": None,
}
MIXER_B = {
    **MIXER_S,
    "model.name": "mixer_b16_224",
    "train.global_batch_size": 1024,
    "datamodule.batch_size": 128,
    "datamodule.batch_size_eval": 256,
}
MIXER_B_CUTMIX = {**MIXER_B, "datamodule.mixup.cutmix_alpha": 0.6, "optimizer.weight_decay": 0.05}
TABLES = {
    "imagenet/vit/vit-s": VIT_S,
    "imagenet/vit/vit-s-butterflyblockdiag-mlp": VIT_S_MONARCH,
    "imagenet/vit/vit-s-butterflyblockdiag-mlpattnlinear": {
        **VIT_S_MONARCH,
        "model.attnlinear_cfg": MONARCH["linear1_cfg"],
    },
    "imagenet/vit/vit-b": {**VIT_S, "model.name": "vit_base_patch16_224"},
    "imagenet/vit/vit-b-fbbfly-mlpattnlinear": {
        **{key: value for key, value in VIT_S.items() if "_cfg" not in key},
        **STRUCTURED,
        "model.name": "vit_base_patch16_224",
        "model.attnlinear_cfg.backend": "dense",
        "model.attnlinear_cfg.sparsity_config.block": 32,
        "model.attnlinear_cfg.sparsity_config.butterfly_size": 16,
        "model.attnlinear_cfg.sparsity_config.n_factors": 2,
    },
    "imagenet/t2tvit/t2tvit7": T2T_7,
    "imagenet/t2tvit/t2tvit14": T2T_14,
    "imagenet/t2tvit/t2tvit14t": T2T_14T,
    "imagenet/t2tvit/t2tvitt14": T2T_14T,
    "imagenet/mixer/mixers": MIXER_S,
    "imagenet/mixer/mixerb": MIXER_B,
    "imagenet/mixer/mixerb-cutmix": MIXER_B_CUTMIX,
    "imagenet/mixer/mixerb-cutmix-bflyblockdiag": {
        **MIXER_B_CUTMIX,
        **STRUCTURED,
        "model.mlp_cfg": MONARCH,
    },
}


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("experiment", TABLES)
def test_experiment_has_the_values_of_the_specification(experiment):
    cfg = composed(experiment)
    wrong = {
        key: (plain(cfg, key), value)
        for key, value in TABLES[experiment].items()
        if plain(cfg, key) != value
    }
    assert not wrong


@pytest.mark.usefixtures("eight")
def test_monarch_twin_differs_from_the_dense_model_in_two_keys_only():
    dense = OmegaConf.to_container(composed("imagenet/vit/vit-s"))
    monarch = OmegaConf.to_container(composed("imagenet/vit/vit-s-butterflyblockdiag-mlp"))
    for cfg in (dense, monarch):
        del cfg["name"], cfg["run_dir"]
        cfg["model"] = {**cfg["model"], "mlp_cfg": None, "drop_path_rate": None}
    assert dense == monarch


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
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RESULT_DIR", raising=False)
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
