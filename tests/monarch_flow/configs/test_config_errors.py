"""What is said about mistakes in a configuration: the key, the value, and what to write instead."""

from __future__ import annotations

import re

from oneflow_accel.errors import UserError

import pytest

from monarch_flow.config import SCHEMA, Model, check_data_dir, compose


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for name in ("WORLD_SIZE", "DATA_DIR", "RESULT_DIR"):
        monkeypatch.delenv(name, raising=False)


def message(*overrides, experiment="mnist/vit"):
    with pytest.raises(UserError) as caught:
        compose([f"experiment={experiment}", *overrides])
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("datamodule.bacth_size=3", "datamodule.batch_size"),
        ("lr=1e-3", "optimizer.lr"),
        ("experiments=mnist/vit", "experiment"),
        ("callbacks.ema.deacy=0.9", "callbacks.ema.decay"),
        ("model.mlp_cfg.linear1_cfg.nblock=8", "model.mlp_cfg.linear1_cfg.nblocks"),
        ("+trainer.max_epoch=3", "trainer.max_epochs"),
    ],
)
def test_unknown_key_names_the_nearest(override, near):
    text = message(override, experiment="mnist/vit-monarch")
    assert override.lstrip("+").split("=")[0] in text
    assert f"did you mean {near}?" in text


# Each with what is said of it.
WRONG = {
    "trainer.max_epochs=ten": "trainer.max_epochs='ten'.*a whole number of at least 1",
    "trainer.min_epochs=1.5": "trainer.min_epochs=1.5.*a whole number of at least 0$",
    "trainer.precision=fp8": "trainer.precision='fp8'.*32, 16, bf16",
    "trainer.graph=1": "trainer.graph=1.*true or false",
    "trainer.gradient_clip_val=0": "a number above 0 or null",
    "trainer.limit_train_batches=-1": "a number of at least 0 or null",
    "train.sparse_to_dense.fraction=70": "fraction=70.*a number from 0 to 1 or null",
    "optimizer.lr=nan": "optimizer.lr=nan.*a number of at least 0",
    "optimizer.betas=[0.9]": r"optimizer.betas=\[0.9\].*a list of 2 values",
    "datamodule.batch_size=0": "datamodule.batch_size=0.*of at least 1",
    "datamodule.train_transforms.re_prob=2": "re_prob=2.*from 0 to 1",
    "datamodule.mixup=true": r"datamodule.mixup=true.*a group of keys \(mixup_alpha",
    "callbacks.ema={decay: 1.0}": "callbacks.ema.decay=1.0.*below 1",
    "model.drop_path_rate=null": "model.drop_path_rate=null.*a number",
    "seed=-1": "seed=-1.*a whole number of at least 0 or null",
}


def test_all_wrong_values_are_named_at_once():
    """Key, value and what is wanted, a line each."""
    lines = message(*WRONG).splitlines()
    assert len(lines) == len(WRONG)
    for override, words in WRONG.items():
        assert [line for line in lines if re.search(words, line)], override


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.name=lamb", ["optimizer.name='lamb'", "adamw or sgd"]),
        ("optimizer.momentum=0.9", ["optimizer: adamw has no option momentum", "amsgrad"]),
        ("trainer.limit_val_batches=1.5", ["1.5 is neither a number of global batches"]),
        ("optimizer.betas=[0.9,1.5]", ["optimizer.betas=[0.9, 1.5]", "of at least 0 and below 1"]),
        ("callbacks.ema={}", ["callbacks.ema.decay is not set"]),
        ("trainer={max_epochs: 2, a: 1}", ["there is no key trainer.a"]),
    ],
)
def test_wrong_value_names_key_value_and_what_is_wanted(override, words):
    text = message(override)
    for word in words:
        assert word in text, text
    assert len(text.splitlines()) == 1, text


@pytest.mark.parametrize(
    ("overrides", "near"),
    [
        (["experiment=imagenet/vit/vit-s-buterflyblockdiag-mlp"], "vit-s-butterflyblockdiag-mlp"),
        (["experiment=vit-monarch"], "mnist/vit-monarch"),
        (["experiment=mnist/vit", "model/vitmlp=fbbfly"], "did you mean model/vitmlp_cfg?"),
        (["experiment=mnist/vit", "callbacks=[default,emma]"], "did you mean ema?"),
    ],
)
def test_unknown_option_or_group_names_the_nearest(overrides, near):
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert near in str(caught.value)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("trainer.max_epochs", "KEY=VALUE"),
        ("~logger", "logger=null"),
        ("seed=1,2", "one value per key"),
        ("hydra.run.dir=x", "run_dir"),
        ("name=[a", "in quotes"),
        ("trainer.max_epochs=${nothing.there}", "trainer.max_epochs"),
        ("mode=exp", "name is not set: give name=VALUE"),
    ],
)
def test_what_is_no_override(override, word):
    assert word in message(override)


def test_files_of_the_user_that_are_wrong(tmp_path):
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    for text, word in (
        ("a: [1", "a file is no YAML: .*mine.yaml"),
        ("# @package _global_\ntrainer: {max_epoch: 1}\n", "trainer.max_epochs"),
        ("# @package _global_\ndefaults: [/experiment/mnist/vti]\n", "mnist/vti"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=word):
            compose(["experiment=mine"], config_dir=str(tmp_path))


def test_mandatory_keys_are_asked_for():
    text = message(experiment="mnist/vit-monarch-d2s")
    assert text == "train.init_from.path is not set: give train.init_from.path=VALUE"


def test_batches_that_do_not_make_the_global_batch(monkeypatch):
    text = message("train.global_batch_size=1000", experiment="imagenet/vit/vit-s")
    assert "train.global_batch_size=1000 is not" in text
    assert "datamodule.batch_size=125 would fit" in text
    assert "is 7 x" not in text
    accumulated = ("trainer.accumulate_grad_batches=2", "train.global_batch_size=128")
    text = message(*accumulated, "datamodule.batch_size=128", experiment="mnist/vit")
    assert "trainer.accumulate_grad_batches=1 would fit" in text
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert "datamodule.batch_size=64 would" in message(experiment="imagenet/vit/vit-s")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "train.global_batch_size=1152 would" in message(experiment="imagenet/vit/vit-s")
    text = message("trainer.devices=8")
    assert "this job has 3 processes" in text
    assert "--nproc_per_node 8 -m monarch_flow.train" in text


def test_data_dir_is_asked_for(tmp_path):
    with pytest.raises(UserError, match=r"datamodule\.data_dir=DIR, or set DATA_DIR"):
        check_data_dir(compose(["experiment=mnist/vit"]))
    with pytest.raises(UserError, match="is not there"):
        check_data_dir(compose(["experiment=mnist/vit", f"datamodule.data_dir={tmp_path}/a"]))
    check_data_dir(compose(["experiment=mnist/vit", f"datamodule.data_dir={tmp_path}"]))
    check_data_dir(compose(["experiment=mnist/vit", "datamodule=synthetic"]))


def test_every_key_of_the_schema_has_words_for_what_it_wants():
    for name, _ in SCHEMA.fields():
        words = SCHEMA.wanted(name)
        assert not {"<", "typing", "Annotated", "something"} & set(words.split()), name
        assert "<class" not in words


def test_the_schema_has_the_options_of_what_it_describes():
    """Keys of the schema go to these as arguments: none may be unknown there, none missing here."""
    import inspect

    from flow_train import hooks as callbacks
    from flow_train.config.keys import Callbacks, Mixup
    from flow_train.data import mixup as mixing
    from monarch_flow import models

    def parameters(function):
        return {name for name in inspect.signature(function).parameters if name != "self"}

    assert set(Mixup.model_fields) == parameters(mixing.Mixup)
    of_models = set().union(*(models.default_config(name) for name in models.list_models()))
    assert set(Model.model_fields) == of_models | {"name"}
    built = callbacks.build_hooks(
        {key: {"decay": 0.9} if key == "ema" else {} for key in Callbacks.model_fields}
    )
    assert set(built) == set(Callbacks.model_fields)
    for key, callback in built.items():
        field = Callbacks.model_fields[key]
        group = next(kind for kind in field.annotation.__args__ if kind is not type(None))
        if parameters(type(callback)) != {"options"}:
            assert set(group.model_fields) == parameters(type(callback)), key
            continue
        taken = inspect.signature(type(callback)).parameters["options"]
        assert taken.annotation == f"keys.{group.__name__}"
        source = inspect.getsource(type(callback))
        assert [name for name in group.model_fields if f"options.{name}" not in source] == [], key


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.init_from.project=true",), "project=true: of which weights? Give train.init_from"),
        (("name=../../evil",), "name=../../evil: the run's folder of that name is to be inside"),
        (("name=a/../../b",), "name=a/../../b"),
        (("name=''",), "name=:"),
        (("eval.results_file=figures.json",), "training does not use it"),
        (("eval.real_labels=real.json",), "eval.ckpt=PATH"),
        (("eval.ckpt=FILE", "resume=auto"), "resume=auto: FILE is evaluated"),
        (("trainer.min_epochs=9", "trainer.max_epochs=3"), "more than trainer.max_epochs=3"),
    ],
)
def test_keys_that_do_not_go_together(overrides, words):
    text = message(*overrides)
    assert words in text
    assert "\n" not in text


def test_a_name_may_have_folders_in_it():
    assert compose(["experiment=mnist/vit", "name=2026/vit-1"]).run_dir == "runs/2026/vit-1"
