"""The configuration in a run's folder."""

from __future__ import annotations

import logging

from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf

from flow_train.config.files import config_differences, config_tree, load_config, save_config
from monarch_flow.config import compose


@pytest.fixture
def cfg(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return compose(["experiment=mnist/vit-monarch"])


def test_what_is_saved_is_what_was_composed(cfg, tmp_path):
    save_config(cfg, tmp_path / "new" / "run")
    saved = load_config(tmp_path / "new" / "run")
    assert OmegaConf.to_container(saved) == OmegaConf.to_container(cfg)
    text = (tmp_path / "new" / "run" / "config.yaml").read_text()
    assert "${" not in text
    tree = (tmp_path / "new" / "run" / "config_tree.txt").read_text()
    assert tree == config_tree(cfg)
    assert "lr: 0.001" in tree
    assert "betas: [0.9, 0.999]" in tree
    assert load_config(tmp_path) is None


def test_a_later_start_says_what_is_different(cfg, tmp_path, caplog):
    save_config(cfg, tmp_path)
    assert config_differences(cfg, tmp_path) == []
    changed = compose(
        ["experiment=mnist/vit-monarch", "trainer.max_epochs=3", "model.mlp_cfg=null"]
    )
    differences = config_differences(changed, tmp_path)
    assert ("trainer.max_epochs", 12, 3) in differences
    assert ("model.mlp_cfg.linear1_cfg.nblocks", 4, None) in differences
    with caplog.at_level(logging.INFO, logger="oneflow_accel"):
        save_config(changed, tmp_path)
    assert "trainer.max_epochs: 3, and 12 at the run's last start" in caplog.text
    assert load_config(tmp_path).trainer.max_epochs == 3


def test_folders_and_files_that_cannot_be_used(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_dir=.*file"):
        save_config(cfg, tmp_path / "file")
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        load_config(tmp_path)
