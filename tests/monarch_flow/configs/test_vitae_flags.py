"""Those who type the options of ViTAE's programs are told what they are called here."""

from __future__ import annotations

import re
import shlex

import pytest

from monarch_flow import train, validate
from monarch_flow.config import compose
from monarch_flow.vitae_flags import translate
from tests.monarch_flow.configs.test_vitae_options import rows


@pytest.mark.parametrize(
    ("flag", "program", "overrides", "remark"),
    [
        ("--eval_checkpoint", "validate.py", ["eval.ckpt=PATH"], ""),
        ("--batch-size", "main.py", ["datamodule.batch_size=128"], ""),
        # It turns the averages off in the one and is on anyway in the other.
        ("--model-ema", "validate.py", ["eval.use_ema=false"], ""),
        ("--model-ema", "main.py", ["callbacks.ema=null"], ""),
        ("--real-labels", "validate.py", ["eval.real_labels=FILE"], ""),
        ("--gp", "main.py", [], "nothing stands for it here (ViTAE has one way to pool"),
        ("--config", "main.py", [], "here it is --config-dir DIR"),
    ],
)
def test_counterparts_are_those_of_the_document(flag, program, overrides, remark):
    translated = translate([flag], program)
    assert translated.overrides == overrides
    assert [text.partition(": ")[2][: len(remark)] for text in translated.remarks] == (
        [remark] if remark else []
    )


def test_other_flags_have_none():
    assert translate(["--hlep"], "main.py") is None


COMMANDS = {
    # ../shared/docs/vitae_spec.md, section 4.2, and the README of the released code.
    "DIR --model ViTAE_basic_Tiny -b 128 --lr 1e-3 --weight-decay .03 --img-size 224 --amp": (
        "experiment=imagenet/vitae/tiny datamodule.data_dir=DIR datamodule.batch_size=128 "
        "train.lr_base=1e-3 optimizer.weight_decay=.03 datamodule.image_size=224 "
        "trainer.precision=16"
    ),
    "DIR --model ViTAE_basic_Tiny --resume last.pth.tar --no-resume-opt": (
        "experiment=imagenet/vitae/tiny datamodule.data_dir=DIR train.init_from.path=last.pth.tar"
    ),
    "DIR --model ViTAE_basic_6M -b 64 -vb 2 --s2d --replace-mlp --epochs 10 --sparse-epoch 155": (
        "experiment=imagenet/vitae/6m datamodule.data_dir=DIR datamodule.batch_size=64 "
        "datamodule.batch_size_eval=128 train.sparse_to_dense.fraction=0.7 "
        "model/vitmlp_cfg=butterflyblockdiag scheduler.t_initial=10 "
        "train.sparse_to_dense.fraction=0.5"
    ),
    "DIR --opt-betas 0.9 0.95 --scale 0.5 1.0 --eval-metric top1 --real-labels '' --seed 7": (
        "experiment=imagenet/t2tvit/t2tvit14 datamodule.data_dir=DIR optimizer.betas=[0.9,0.95] "
        "datamodule.train_transforms.scale=[0.5,1.0] seed=7"
    ),
    "DIR --model ViTAE_basic_Tiny --model-ema-decay 0.9999": (
        "experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
        "callbacks.ema.decay=${scaled_decay:0.9999}"
    ),
    # Somebody who knows our keys, and one option of theirs.
    "experiment=mnist/vitae-tiny --model ViTAE_basic_Small": (
        "experiment=mnist/vitae-tiny model/vitaemodel=small"
    ),
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_ends_in_the_whole_one_here(typed, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train.main(shlex.split(typed)) == 2
    *_, last = capsys.readouterr().err.splitlines()
    command = last.partition("here it is: ")[2]
    module = "python -m monarch_flow.train "
    assert command.startswith(module)
    words = shlex.split(command.removeprefix(module))
    assert words == COMMANDS[typed].split()
    assert compose([word for word in words if not word.startswith("train.init_from")])


def test_validation_and_several_processes(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    argv = ["DIR", "--model", "ViTAE_basic_Tiny", "--eval_checkpoint", "FILE", "--model-ema"]
    assert validate.main(argv) == 2
    assert capsys.readouterr().err.endswith(
        "here it is: python -m oneflow.distributed.launch --nproc_per_node 2 -m "
        "monarch_flow.validate experiment=imagenet/vitae/tiny datamodule.data_dir=DIR "
        "eval.ckpt=FILE eval.use_ema=false\n"
    )


def test_each_option_without_a_counterpart_is_named(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    argv = ["--model", "ViTAE_basic_Tiny", "--tta", "2", "-b", "128", "--other"]
    argv += ["--model-ema-force-cpu", "DIR"]
    assert train.main(argv) == 2
    *remarks, last = capsys.readouterr().err.splitlines()
    for line, word in zip(remarks, ("--tta", "--other; --help", "force-cpu"), strict=True):
        assert word in line
    assert last.endswith("batch_size=128 datamodule.data_dir=DIR")


def test_every_option_is_translated():
    for row in rows():
        codes = re.findall(r"`(-[^`]+)`", row[0])
        for code in codes:
            name, *values = code.split()
            values = values or (codes[0].split()[1:] if row[1] != "none" else [])
            translated = translate([name, *values, "DIR"], "main.py")
            if translated is None:
                assert "validate.py" in row[0], code
                continue
            assert "datamodule.data_dir=DIR" in translated.overrides, code
            assert len(translated.overrides) + len(translated.remarks) > 1 or name in (
                "--model",
                "--local_rank",
                "--no-resume-opt",
            ), code


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("-cfg job", "there is no flag -cfg; did you mean --cfg?"),
        ("--foo", "there is no flag --foo; --help lists the flags"),
        ("-m experiment=mnist/vit", "-m: a command is one run"),
        ("-c settings.yaml", "a file of settings is DIR/experiment/NAME.yaml"),
    ],
)
def test_a_flag_that_is_not_there(typed, said, capsys):
    assert train.main(typed.split()) == 2
    assert said in capsys.readouterr().err
