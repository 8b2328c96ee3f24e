"""The command line of python -m monarch_flow.train: texts it prints, and how it fails."""

from __future__ import annotations

import pytest
import yaml

from monarch_flow import train
from monarch_flow.engine import run as engine_run

RUN = engine_run.run


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "DATA_DIR", "RESULT_DIR"):
        monkeypatch.delenv(name, raising=False)
    given = []
    monkeypatch.setattr(engine_run, "run", given.append)
    return given


def test_help_lists_flags_groups_and_keys(capsys, ran):
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (
        "--cfg job",
        "--resolve",
        "--config-dir",
        "mode=",
        "debug default eval exp smoke",
        "model/vitmlp_cfg=",
        "imagenet/vit/vit-s-butterflyblockdiag-mlp",
        "trainer.max_epochs=",
        "oneflow.distributed.launch",
    ):
        assert word in text, word
    assert max(map(len, text.splitlines())) <= 100
    assert train.main(["-h", "experiment=mnist/vit-monarch"]) == 0
    text = capsys.readouterr().out
    assert "in experiment=mnist/vit-monarch" in text
    assert any(line.split()[:2] == ["train.global_batch_size=", "128"] for line in text.split("\n"))
    assert not ran


def test_cfg_job_prints_the_configuration(capsys, ran):
    arguments = ["experiment=mnist/vit-monarch", "trainer.max_steps=7"]
    assert train.main([*arguments, "--cfg", "job"]) == 0
    raw = yaml.safe_load(capsys.readouterr().out)
    assert raw["trainer"]["max_epochs"] == "${add:${scheduler.t_initial},${scheduler.cooldown}}"
    assert raw["trainer"]["max_steps"] == 7
    assert train.main([*arguments, "--cfg=job", "--resolve"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["trainer"]["max_epochs"] == 12
    assert resolved["model"]["mlp_cfg"]["linear2_cfg"]["nblocks"] == 4
    assert not ran


def test_a_run_is_given_to_the_engine(ran, tmp_path):
    data = f"datamodule.data_dir={tmp_path}"
    assert train.main(["experiment=mnist/vit", data, "resume=auto"]) == 0
    (cfg,) = ran
    assert cfg.resume == "auto"
    assert cfg.datamodule.data_dir == str(tmp_path)
    with pytest.raises(AttributeError):
        cfg.trainer.no_such_key  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["nothing to do", "experiment=NAME"]),
        (["experiment=mnist/vit"], ["datamodule.data_dir=DIR"]),
        (["--hlep"], ["there is no flag --hlep", "did you mean --help?"]),
        (["--cfg", "all"], ["job"]),
        (["-c", "recipe.yaml"], ["recipe.yaml", "--config-dir DIR"]),
        (["--config-dir", "nowhere", "experiment=mnist/vit"], ["nowhere", "no such folder"]),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(arguments, words, capsys, ran):
    assert train.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("monarch_flow.train: error: ")
    for word in words:
        assert word in err, err
    assert not ran


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupt_says_what_there_is_to_go_on_with(monkeypatch, capsys, tmp_path, saved):
    def interrupted(cfg, seed):
        raise KeyboardInterrupt

    if saved:
        (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    monkeypatch.setattr(engine_run, "run", RUN)
    monkeypatch.setattr(engine_run, "build_data", interrupted)
    places = (f"datamodule.data_dir={tmp_path}", f"run_dir={tmp_path / 'run'}")
    assert train.main(["experiment=mnist/vit", *places]) == 130
    expected = "step-00000003: continue with resume=auto" if saved else "no checkpoint was written"
    assert expected in capsys.readouterr().err


def test_only_the_first_process_prints(monkeypatch, capsys):
    """Of errors see tests/oneflow_accel/test_command_ends.py."""
    monkeypatch.setenv("RANK", "1")
    assert train.main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert not out + err
