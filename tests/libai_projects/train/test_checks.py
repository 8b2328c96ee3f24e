"""What is found before the start: layouts, batch sizes, files."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from oneflow_accel.backends.base import FEATURES, Support
from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from flow_train.checkpoint.folders import CheckpointManager
from flow_train.config.compose import config_keys
from flow_train.config.schema import phrase
from flow_train.metrics.work import training_flops
from libai_projects.command import adapt, checks, output
from libai_projects.command.arguments import Options
from libai_projects.command.checks import Layout
from libai_projects.command.config import SCHEMA, apply_overrides, check_keys, load_config
from libai_projects.engine import parts
from tests.libai_projects.train.conftest import CONFIG, PROJECTS, TINY

OPTIONS = Options(config_file=CONFIG)


@pytest.fixture
def make_cfg(prompts, monkeypatch, tmp_path):
    """Loads the MagicPrompt config on our data, with overrides."""
    for name, value in prompts.items():
        monkeypatch.setenv(name, value)

    def make(*overrides: str):
        cfg = load_config(str(PROJECTS / CONFIG))
        return apply_overrides(cfg, [*TINY, f"train.output_dir={tmp_path}", *overrides], CONFIG)

    return make


def refused(check, *parts: str) -> None:
    with pytest.raises(UserError) as error:
        check()
    for part in parts:
        assert part in str(error.value)


def test_sound_run_passes(make_cfg):
    cfg = make_cfg()
    checks.check_run(cfg, OPTIONS)
    assert cfg.train.global_batch_size == 4
    assert cfg.train.num_accumulation_steps == 1
    assert cfg.model.cfg.vocab_size_real == 400


@pytest.mark.parametrize(
    ("sizes", "world", "layout"),
    [
        ((), 4, Layout(4, 1, 1)),
        (("tensor=2", "pipeline=2"), 4, Layout(1, 2, 2)),
        (("data=2", "pipeline=2"), 4, Layout(2, 1, 2)),
        # 1 is what LiBai's own configs say; what is left is data parallel there too.
        (("data=1",), 2, Layout(2, 1, 1)),
    ],
)
def test_layouts(make_cfg, sizes, world, layout):
    keys = [f"train.dist.{size.replace('=', '_parallel_size=')}" for size in sizes]
    assert checks.check_layout(make_cfg(*keys), world) == layout


@pytest.mark.parametrize(
    ("sizes", "world", "parts"),
    [
        (("tensor=2",), 1, ("multiple of 2 processes", "there are 1")),
        (("data=4",), 2, ("leave 2", "start 4")),
        (("tensor=0",), 1, ("tensor_parallel_size=0",)),
    ],
)
def test_layouts_that_do_not_fit_the_processes(make_cfg, sizes, world, parts):
    keys = [f"train.dist.{size.replace('=', '_parallel_size=')}" for size in sizes]
    refused(lambda: checks.check_layout(make_cfg(*keys), world), *parts)


@pytest.mark.parametrize(
    ("override", "layout", "parts"),
    [
        ("model.cfg.num_attention_heads=6", Layout(1, 4, 1), ("num_attention_heads=6", "=4; si")),
        (
            "model.cfg.num_layers=0",
            Layout(1, 1, 1),
            ("num_layers=0: it must be a whole number of at least 1",),
        ),
        (
            "model.cfg.attention_dropout_prob=nan",
            Layout(1, 1, 1),
            ("prob=nan: it must be a number of at least 0 and below 1",),
        ),
        ("+model.cfg.num_key_value_heads=3", Layout(1, 1, 1), ("num_key_value_heads=3",)),
        ("model.cfg.num_layers=3", Layout(1, 1, 2), ("num_layers=3", "take a divisor")),
        ("train.dist.pipeline_num_layers=4", Layout(1, 1, 2), ("pipeline_num_layers=4",)),
        ("train.dist.custom_pipeline_stage_id=[0]", Layout(1, 1, 2), ("2 layers", "1 entries")),
        ("train.dist.custom_pipeline_stage_id=[1,0]", Layout(1, 1, 2), ("rising order",)),
        ("train.dist.custom_pipeline_stage_id=[0,0]", Layout(1, 1, 2), ("stages 0 to 1",)),
        ("dataloader.train.dataset.0.max_seq_length=64", Layout(1, 1, 1), ("64", "32 positions")),
    ],
)
def test_models_that_do_not_fit_the_layout(make_cfg, override, layout, parts):
    refused(lambda: checks.check_model(make_cfg(override), layout), *parts)
    checks.check_model(make_cfg(), layout)


@pytest.mark.parametrize(
    ("given", "complete"),
    [
        (("train_micro_batch_size=4",), (4, 1, 8)),
        (("train_micro_batch_size=4", "num_accumulation_steps=3"), (4, 3, 24)),
        (("train_micro_batch_size=4", "global_batch_size=16"), (4, 2, 16)),
        (("train_micro_batch_size=null", "global_batch_size=16"), (8, 1, 16)),
        (
            ("train_micro_batch_size=null", "global_batch_size=16", "num_accumulation_steps=4"),
            (2, 4, 16),
        ),
    ],
)
def test_any_two_batch_sizes_give_the_third(make_cfg, given, complete):
    cfg = make_cfg(*(f"train.{text}" for text in given))
    checks.complete_batch_sizes(cfg, Layout(2, 1, 1))
    train = cfg.train
    found = (train.train_micro_batch_size, train.num_accumulation_steps, train.global_batch_size)
    assert found == complete


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (("train_micro_batch_size=4", "global_batch_size=10"), ("contradict", "(2 here)")),
        (
            ("global_batch_size=16", "num_accumulation_steps=3"),
            ("global_batch_size=16", "num_accumulation_steps=3"),
        ),
        (("train_micro_batch_size=null",), ("set train.train_micro_batch_size",)),
    ],
)
def test_batch_sizes_that_contradict(make_cfg, given, parts):
    cfg = make_cfg(*(f"train.{text}" for text in given))
    refused(lambda: checks.complete_batch_sizes(cfg, Layout(2, 1, 1)), *parts)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.zero_optimization.enabled=true", "graph.enabled=true"),
        ("train.activation_checkpoint.enabled=true", "graph.enabled=true"),
        (
            "graph.enabled=true train.zero_optimization={enabled:true,stage:0}",
            "train.zero_optimization.stage=0 is not 1, 2 or 3",
        ),
        ("train.warmup_ratio=1", "warmup_ratio"),
        ("train.train_iter=0", "nothing to train"),
        ("train.evaluation.eval_metric=foo", "take validation/lm_loss_PPL"),
        (
            "train.evaluation.eval_metric=validation/lm_loss_ppl",
            "did you mean validation/lm_loss_PPL?",
        ),
        ("train.evaluation.eval_mode=lower", "eval_mode='lower': it must be min or max"),
        ("optim.lr=-1", "optim: AdamW cannot be made of these settings: Invalid learning rate: -1"),
        ("optim.params.clip_grad_max_norm=-1", "clip_grad_max_norm=-1"),
        ("optim.params.weight_decay_norm=-1", "weight_decay_norm=-1"),
        ("optim._target_=oneflow.optim.SGD", "unexpected keyword argument 'betas'"),
        (
            "train.warmup_ratio=0.1 train.scheduler.warmup_method=soft",
            "WarmupExponentialLR cannot be made of these settings: 'warmup_method'",
        ),
    ],
)
def test_settings_that_cannot_be(make_cfg, override, part):
    refused(lambda: checks.check_run(make_cfg(*override.split()), OPTIONS), part)


def test_a_config_file_is_held_to_the_schema(make_cfg):
    """Not only what is typed; what is null there is as if it were not."""
    cfg = make_cfg("train.train_epoch=1")
    cfg.train.train_iter = None
    checks.check_run(cfg, OPTIONS)
    cfg.train.max_minutes, cfg.train.evaluation.eval_mode = -3, "lower"
    refused(
        lambda: checks.check_run(cfg, OPTIONS),
        "max_minutes=-3",
        "eval_mode='lower'",
    )


@pytest.mark.parametrize("value", [10**400, math.nan], ids=["large", "nan"])
def test_numbers_that_nothing_can_hold(make_cfg, value):
    """Each of a config's, wherever it stands, and each count that is below its least."""
    cfg = make_cfg()
    values = {key: OmegaConf.select(cfg, key) for key in config_keys(cfg)}
    keys = {key for key, now in values.items() if type(now) in (int, float)}
    assert keys >= {
        "train.seed",
        "optim.betas.1",
        "dataloader.train.splits.0.0",
        "model.cfg.num_layers",
    }
    words = {key: phrase(FieldInfo.from_annotation(kind)) for key, kind in SCHEMA.items()}
    found = {key: re.search(r"(?:least|above|from) (\d)", text) for key, text in words.items()}
    least = {key: int(match[1]) for key, match in found.items() if match}
    assert len(least) > 25
    assert least.keys() >= {"train.seed", "train.evaluation.patience", "train.warmup_ratio"}
    for key in {*keys, *least} - {"train.dist.pipeline_num_layers"}:
        before = OmegaConf.select(cfg, key)
        for wrong in (value, least[key] - 1) if key in least else (value,):
            OmegaConf.update(cfg, key, wrong)
            refused(lambda: check_keys(cfg), f"{key}=")
        OmegaConf.update(cfg, key, before)
    check_keys(cfg)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "optim.lr=0",
            "train.seed=9223372036854775807",
            "optim.params.clip_grad_max_norm=null",
            "train.evaluation.eval_metric=lm_loss_PPL",
        ),
        ("train.evaluation.eval_metric=test/lm_loss", "train.warmup_ratio=0.5"),
    ],
)
def test_settings_at_their_limits_pass(make_cfg, overrides):
    checks.check_run(make_cfg(*overrides), OPTIONS)


def test_several_mistakes_are_one_error(make_cfg, tmp_path):
    cfg = make_cfg(
        f"tokenization.tokenizer.vocab_file={tmp_path / 'none.json'}",
        f"dataloader.train.dataset.0.data_prefix={tmp_path / 'none'}",
        "train.dist.tensor_parallel_size=2",
        "train.train_iter=0",
    )
    parts = ("none.json", "MAGICPROMPT_VOCAB", "data_prefix", "MAGICPROMPT_DATA", "2 processes")
    refused(lambda: checks.check_run(cfg, OPTIONS), *parts, "nothing to train")


def test_damaged_data(make_cfg, prompts, tmp_path):
    for end in (".idx", ".bin"):
        shutil.copy(prompts["MAGICPROMPT_DATA"] + end, tmp_path / f"data{end}")
    file = tmp_path / "data.bin"
    file.write_bytes(file.read_bytes()[:-10])
    prefix = f"dataloader.train.dataset.0.data_prefix={tmp_path / 'data'}"
    refused(lambda: checks.check_run(make_cfg(prefix), OPTIONS), str(file), "truncated")


def test_too_little_data_for_a_batch(make_cfg):
    cfg = make_cfg("train.train_micro_batch_size=100000")
    refused(lambda: checks.check_run(cfg, OPTIONS), "fewer than one batch", "100000")


def test_output_directory(make_cfg, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    cfg = make_cfg(f"train.output_dir={file / 'out'}")
    refused(lambda: output.check_output(cfg, OPTIONS), "is a file")
    usage = SimpleNamespace(total=10**9, used=10**9 - 10**5, free=10**5)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage)
    refused(lambda: output.check_output(make_cfg(), OPTIONS), "0.1 MB are free")


def test_directory_that_cannot_be_written_to(make_cfg, tmp_path, monkeypatch):
    # Root may write everywhere, so the system's answer is replaced.
    monkeypatch.setattr(output.os, "access", lambda path, mode: False)
    refused(lambda: output.check_output(make_cfg(), OPTIONS), "no permission")


def test_nothing_to_resume_or_evaluate(make_cfg, tmp_path):
    cfg = make_cfg()
    checks.check_run(cfg, Options(config_file=CONFIG, resume=True))
    refused(
        lambda: checks.check_run(cfg, Options(config_file=CONFIG, eval_only=True)), "load_weight"
    )
    cfg = make_cfg(f"train.load_weight={tmp_path / 'nowhere'}")
    refused(lambda: checks.check_run(cfg, OPTIONS), "nowhere", "does not exist")
    cfg = make_cfg(f"train.load_weight={tmp_path}")
    refused(lambda: checks.check_run(cfg, OPTIONS), "neither")


def test_run_of_another_model(make_cfg, tmp_path):
    backup = tmp_path / "config.yaml"
    backup.write_text(
        "model:\n  cfg: {num_layers: 2, hidden_size: 128}\n"
        "optim: {betas: !!python/tuple [0.9, 0.999]}\n"
    )
    refused(
        lambda: output.check_same_model(make_cfg(), backup),
        "hidden_size=64 (there: 128)",
        str(tmp_path),
    )
    backup.write_text("model: {cfg: {num_key_value_heads: 2}}\n")
    cfg = make_cfg("+model.cfg.num_key_value_heads=4")
    refused(lambda: output.check_same_model(cfg, backup), "num_key_value_heads=4 (there: 2)")
    backup.write_text("model: {cfg: {num_layers: 2}}\n")
    output.check_same_model(make_cfg(), backup)


def test_two_runs_in_one_directory(make_cfg):
    """A killed run's data workers may outlive it; they do not hold its directory."""
    cfg = make_cfg()
    manager = CheckpointManager(Path(cfg.train.output_dir) / "checkpoints")
    ready, told = os.pipe()
    first = os.fork()
    if first == 0:
        manager.claim()
        worker = os.fork()
        if worker:
            os.write(told, str(worker).encode())
        time.sleep(60)
    worker = int(os.read(ready, 20))
    refused(lambda: output.make_room(cfg, resume=False), "another run is writing there")
    refused(lambda: output.make_room(cfg, resume=True), "another run is writing there")
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert output.make_room(cfg, resume=False) == []
    os.kill(worker, signal.SIGKILL)


class BareDevice:
    name = "bare"

    def supports(self, feature: str) -> Support:
        assert feature in FEATURES
        return Support(False, f"no {feature}")


def test_config_is_fitted_to_a_bare_device(make_cfg):
    cfg = make_cfg("graph.enabled=true", "model.cfg.bias_gelu_fusion=true")
    lines = adapt.adapt_to_device(cfg, BareDevice())
    assert cfg.graph.enabled is False
    assert cfg.train.amp.enabled is False
    assert cfg.model.cfg.bias_gelu_fusion is False
    # Left to the model, which asks the device.
    assert cfg.model.cfg.attention_fusion is None
    assert cfg.optim.params.clip_grad_max_norm is None
    expected = ["train.amp.enabled", "graph.enabled", "model.cfg.bias_gelu_fusion"]
    expected.append("optim.params.clip_grad_max_norm")
    assert [line.split(": ")[1].split("=")[0] for line in lines] == expected
    assert all(": no " in line for line in lines)


def test_what_prepare_holds_out_is_validated_on(make_cfg, prompts, tmp_path):
    """All blocks of the rest are for training then, but those of the test."""
    for name in ("data", "data_valid"):
        for end in (".idx", ".bin"):
            shutil.copy(prompts["MAGICPROMPT_DATA"] + end, tmp_path / f"{name}{end}")
    cfg = make_cfg(f"dataloader.train.dataset.0.data_prefix={tmp_path / 'data'}")
    (line,) = adapt.use_held_out(cfg)
    assert str(tmp_path / "data_valid") in line
    train = cfg.dataloader.train
    assert train.dataset[1].indexed_dataset.data_prefix == str(tmp_path / "data_valid")
    assert train.splits == [[90, 0, 10], [0, 1, 0]]
    checks.check_run(cfg, OPTIONS)
    assert adapt.use_held_out(cfg) == []
    assert adapt.use_held_out(make_cfg()) == []
    wrong = make_cfg("dataloader.train.splits=[[80,20]]")
    assert adapt.use_held_out(wrong) == []
    refused(lambda: checks.check_run(wrong, OPTIONS), "three shares")


def test_flops_of_a_token_of_gpt2(make_cfg, monkeypatch):
    """124M: 12 x 12 x 768^2 + 50257 x 768 weights = 123.5M; 6 x that + 12 x 12 x 768 x 1024."""
    monkeypatch.setattr(parts, "replicas", lambda: 1)
    cfg = load_config(str(PROJECTS / CONFIG))
    cfg.train.test_micro_batch_size = 4
    macs = parts.make_task(cfg).macs_per_unit(None, {}, None)
    assert training_flops(macs) == pytest.approx(8.544e8, rel=1e-3)
