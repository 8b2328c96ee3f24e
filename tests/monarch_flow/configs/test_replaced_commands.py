"""Other projects' commands in docs/coming_from.md: each runs, or ends in the line it says."""

from __future__ import annotations

import re
import shlex

import pytest

from monarch_flow import train, validate
from monarch_flow.config import compose, with_our_names
from monarch_flow.engine import run as engine_run
from tests.launch import REPOSITORY, run_process

PAGES = {
    "docs/coming_from.md": "## Commands that you know",
    "docs/zh-CN/coming_from.md": "## 您熟悉的命令",
}


def table(name: str) -> list[tuple[str, str]]:
    """(command, what the last column has in code first, if that is a command)."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    section = text.partition(f"{PAGES[name]}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    found = []
    for _, typed, here in rows[2:]:
        code = re.match(r"`(python -m [^`]+)`", here)
        found.append((typed.strip("`"), code[1] if code else ""))
    return found


COMMANDS = table("docs/coming_from.md")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "DATA_DIR", "RESULT_DIR", "IMAGENET_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_both_languages_have_the_same_commands():
    assert len(COMMANDS) == 9
    assert table("docs/zh-CN/coming_from.md") == COMMANDS


@pytest.mark.parametrize("typed", [c for c, _ in COMMANDS if " run.py " in c])
def test_flys_commands_are_understood(typed, monkeypatch, capsys, tmp_path):
    """As far as the run; what it would run is what the keys say."""
    given = []
    monkeypatch.setattr(engine_run, "run", given.append)
    words = shlex.split(typed.replace("DIR", str(tmp_path)))[2:]
    assert train.main(words) == 0, capsys.readouterr().err
    (cfg,) = given
    if "eval.ckpt=FILE" in words:
        assert (cfg.mode, cfg.model.name) == ("eval", "t2t_vit_t_14")
        assert cfg.model.tokens_type == "transformer"
    if "butterfly_size=8" in typed:
        for layer in ("linear1_cfg", "linear2_cfg"):
            assert cfg.model.mlp_cfg[layer].sparse_cfg.sparsity_config.butterfly_size == 8
    assert compose([with_our_names(word) for word in words]) == cfg


def test_run_py_is_the_command_from_any_folder(tmp_path):
    arguments = ["experiment=mnist/vit", "train.optimizer.lr=0.5", "--cfg", "job", "--resolve"]
    result = run_process([REPOSITORY / "run.py", *arguments], cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "\n  lr: 0.5\n" in result.stdout


@pytest.mark.parametrize(("typed", "here"), [row for row in COMMANDS if row[1]])
def test_vitaes_options_name_the_page_and_the_command_beside_them_is_one(typed, here, capsys):
    program, *words = shlex.split(typed)[1:]
    main = validate.main if program == "validate.py" else train.main
    assert main(words) == 2
    assert "monarch_flow/docs/vitae_options.md" in capsys.readouterr().err
    compose([with_our_names(word) for word in shlex.split(here)[3:]])


def test_there_is_nothing_to_convert(tmp_path):
    typed = next(command for command, _ in COMMANDS if "convert_checkpoint" in command)
    script = REPOSITORY / shlex.split(typed)[1]
    file = tmp_path / "81.7_T2T_ViTt_14.pth.tar"
    file.write_bytes(b"weights")
    result = run_process([script, file], cwd=tmp_path)
    assert result.returncode == 0
    assert "needs no conversion" in result.stdout
    assert f"eval.ckpt={file}" in result.stdout
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"weights", [file])
    assert run_process([script, "absent"], cwd=tmp_path).returncode == 2
