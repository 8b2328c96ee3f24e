"""What a command line, a mode and files of one's own can choose in a composed config."""

from __future__ import annotations

import oneflow as flow
import pytest

from flow_train.optim import build_optimizer, build_schedule
from monarch_flow.config import compose
from tests.monarch_flow.configs.composed import MONARCH, composed, plain


def test_a_mode_wins_over_the_experiment_and_the_command_line_over_both():
    cfg = composed("imagenet/vit/vit-s", "mode=debug", "logger=wandb")
    assert cfg.mode == "debug"
    assert cfg.trainer.fast_dev_run is True
    assert cfg.callbacks.model_checkpoint is None
    assert cfg.logger.wandb is None
    assert cfg.run_dir == "runs/debug/imagenet-vit-vit-s"
    cfg = composed("imagenet/vit/vit-s", "mode=debug", "trainer.fast_dev_run=3")
    assert cfg.trainer.fast_dev_run == 3

    cfg = composed("mnist/vit", "mode=smoke")
    assert (cfg.trainer.max_epochs, cfg.trainer.limit_train_batches) == (1, 2)
    assert composed("mnist/vit", "mode=exp", "name=a").run_dir == "runs/experiments/a"


def test_evaluation_by_mode_or_by_checkpoint():
    assert composed("mnist/vit").mode == "default"
    cfg = composed("mnist/vit", "eval.ckpt='~/there'")
    assert cfg.mode == "eval"
    assert not cfg.eval.ckpt.startswith("~")
    cfg = composed("mnist/vit", "mode=eval", "work_dir=here")
    assert cfg.eval.ckpt == "here/mnist-vit"
    cfg = composed("imagenet/t2tvit/t2tvit14t-eval", "eval.ckpt=there")
    assert (cfg.mode, cfg.eval.run_val, cfg.eval.run_test) == ("eval", False, True)
    # The weights that a run began with are of no interest.
    for word in ("eval.ckpt=there", "mode=eval"):
        cfg = compose(["experiment=mnist/vit-monarch-d2s", word])
        assert (cfg.mode, cfg.train.init_from.path) == ("eval", None)


def test_groups_can_be_chosen_on_the_command_line(monkeypatch):
    monkeypatch.setenv("DATA_DIR", "elsewhere")
    cfg = composed("imagenet/vit/vit-b", "model/vitmlp_cfg=butterflyblockdiag")
    assert plain(cfg, "model.mlp_cfg") == MONARCH
    assert cfg.datamodule.data_dir == "elsewhere"
    cfg = composed("imagenet/vit/vit-b-fbbfly-mlp", "model/vitmlp_cfg=null", "logger=null")
    assert cfg.model.mlp_cfg is None
    assert cfg.logger.tensorboard is None
    cfg = composed(
        "mnist/vit", "logger=[csv,wandb]", "callbacks=[default,norm-monitor]", "seed=null"
    )
    assert cfg.logger.csv == {}
    assert (cfg.logger.wandb.id, cfg.logger.wandb.mode) == ("mnist-vit", "offline")
    assert cfg.seed is None
    assert cfg.callbacks.norm_monitor.layer_norm_only is False
    cfg = composed("imagenet/vit/vit-s", "scheduler=linear", "trainer.max_epochs=90")
    assert (cfg.scheduler.name, cfg.scheduler.t_total) == ("linear", 90)
    build_schedule(cfg.scheduler, cfg.optimizer.lr)
    for kind in ("linear", "constant"):
        cfg = composed("imagenet/vitae/tiny", f"scheduler={kind}")
        schedule = build_schedule(cfg.scheduler, 0.1)
        assert (schedule.options.name, cfg.trainer.max_epochs) == (kind, 310)
        assert schedule(0) == pytest.approx(1e-6)
        assert schedule(310) == pytest.approx({"linear": 1e-5, "constant": 0.1}[kind])
    cfg = composed("imagenet/vit/vit-s", "optimizer=sgd", "optimizer.lr=0.5")
    assert plain(cfg, "optimizer") == {
        "name": "sgd",
        "lr": 0.5,
        "weight_decay": 0.05,
        "momentum": 0.9,
    }


def test_keys_that_the_files_leave_out_can_be_set():
    cfg = composed(
        "mnist/vit",
        "callbacks.ema.decay=0.99",
        "model.attnlinear_cfg=monarch",
        "model.qkv_bias=false",
        "datamodule.mixup={mixup_alpha: 0.2}",
        "resume=true",
        "name=2024",
        "experiment=mnist/vit-monarch",
        "model.mlp_cfg.linear1_cfg.nblocks=8",
        "+model.mlp_cfg.drop_btw_fcs=false",
    )
    assert cfg.callbacks.ema == {"decay": 0.99, "use_num_updates": False}
    assert cfg.model.attnlinear_cfg == "monarch"
    assert cfg.datamodule.mixup.mixup_alpha == 0.2
    assert (cfg.resume, cfg.name) == ("auto", "2024")
    assert cfg.model.mlp_cfg.linear2_cfg.nblocks == 8
    assert cfg.model.mlp_cfg.drop_btw_fcs is False


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["optimizer.amsgrad=true"], "optimizer.amsgrad", True),
        (["opt=AdamW"], "optimizer.name", "adamw"),
        (
            ["optimizer=sgd", "optimizer.nesterov=true", "optimizer.maximize=true"],
            "optimizer.nesterov",
            True,
        ),
        (["opt=nesterov"], "optimizer.nesterov", True),
        (["optimizer=momentum"], "optimizer.momentum", 0.9),
        (["optimizer._target_=torch.optim.AdamW"], "optimizer.name", "adamw"),
        (["scheduler.name=CosineLRScheduler"], "scheduler.name", "cosine"),
        (["sched=Cosine", "scheduler.t_in_epochs=true"], "scheduler.t_in_epochs", True),
        (["model.drop_path=0.3"], "model.drop_path_rate", 0.3),
        (["trainer.max_epochs=-1", "trainer.max_steps=5"], "trainer.max_epochs", None),
        (
            ["datamodule.train_transforms.color_jitter=[0.4,0.4,0.4,0.1]"],
            "datamodule.train_transforms.color_jitter",
            [0.4, 0.4, 0.4, 0.1],
        ),
        (["datamodule.train_transforms.interpolation=box"], None, None),
        (["datamodule.mixup={mixup_alpha: 0.2, num_classes: 10}"], None, None),
    ],
)
def test_every_option_of_what_is_built_can_be_typed(overrides, key, value):
    cfg = composed("mnist/vit", *overrides)
    assert key is None or plain(cfg, key) == value
    options = {name: option for name, option in cfg.optimizer.items() if option is not None}
    build_optimizer(flow.nn.Linear(2, 2), options, cfg.optimizer_param_grouping)
    build_schedule(cfg.scheduler, cfg.optimizer.lr)


def test_own_experiments_come_from_a_folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /experiment/mnist/vit-monarch\n  - _self_\n\n"
        "__steps: 60\noptimizer:\n  lr: 3e-4\n"
    )
    cfg = compose(["experiment=mine"], config_dir=str(tmp_path))
    assert cfg.optimizer.lr == 3e-4
    assert cfg.name == "mine"
    assert plain(cfg, "model.mlp_cfg") == MONARCH


def test_a_group_that_refers_to_another_can_be_changed_alone():
    cfg = composed(
        "mnist/vit-monarch",
        "datamodule.test_transforms.crop_pct=0.5",
        "model.mlp_cfg.linear2_cfg.nblocks=2",
    )
    assert (cfg.datamodule.val_transforms.crop_pct, cfg.datamodule.test_transforms.crop_pct) == (
        1.0,
        0.5,
    )
    assert cfg.model.mlp_cfg.linear1_cfg.nblocks == 4
    assert cfg.model.mlp_cfg.linear2_cfg.nblocks == 2
