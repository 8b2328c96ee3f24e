"""Those who type the options of ViTAE's programs are told what they are called here."""

from __future__ import annotations

import pytest

from monarch_flow import train
from monarch_flow.vitae_flags import counterpart


@pytest.mark.parametrize(
    ("flag", "program", "words"),
    [
        ("--eval_checkpoint", "validate.py", "here it is eval.ckpt=PATH"),
        ("-b", "main.py", "here it is datamodule.batch_size=128"),
        ("--batch-size", "main.py", "here it is datamodule.batch_size=128"),
        # It turns the averages off in the one and is on anyway in the other.
        ("--model-ema", "validate.py", "here it is eval.use_ema=false"),
        ("--model-ema", "main.py", "here it is callbacks.ema=null"),
        ("--real-labels", "validate.py", "here it is eval.real_labels=FILE"),
        ("--gp", "main.py", "nothing stands for it here (ViTAE has one way to pool"),
    ],
)
def test_counterparts_are_those_of_the_document(flag, program, words):
    text = counterpart(flag, program)
    assert text is not None
    assert text.startswith(words)


def test_other_flags_have_none():
    assert counterpart("--hlep", "main.py") is None


def test_each_flag_typed_is_named(capsys):
    argv = ["--model", "ViTAE_basic_Tiny", "-b", "128", "--lr=1e-3", "--amp", "--other"]
    assert train.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, word in zip(
        lines,
        ("model/vitaemodel=tiny", "datamodule.batch_size", "lr_base", "precision", "--help"),
        strict=True,
    ):
        assert word in line
