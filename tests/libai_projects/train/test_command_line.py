"""Flags, overrides and config files: what is read, and what is said about mistakes."""

from __future__ import annotations

from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf

from flow_train.config.compose import config_keys
from libai_projects.command import arguments
from libai_projects.command.arguments import parse_options
from libai_projects.command.config import apply_overrides, load_config
from tests.libai_projects.train.conftest import PROJECTS

NAME = "gpt2_training.py"
FOLDER = PROJECTS / "projects" / "MagicPrompt" / "configs"
FILE = ("--config-file", "config.py")


@pytest.fixture
def cfg():
    return load_config(str(FOLDER / NAME))


def test_flags_stand_before_or_after_overrides():
    options = parse_options([*FILE, "a=1", "--resume", "b=[1,2]", "--device", "cpu", "~c"])
    assert options.resume
    assert not options.eval_only
    assert options.device == "cpu"
    assert options.overrides == ["a=1", "b=[1,2]", "~c"]


@pytest.mark.parametrize("argv", [("c.py", "--resume", "a=1"), ("a=1", "--resume", "c.py")])
def test_the_config_by_its_place(argv):
    options = parse_options(argv)
    assert (options.config_file, options.resume, options.overrides) == ("c.py", True, ["a=1"])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ((*FILE, "--resum"), "did you mean --resume?"),
        ((*FILE, "--zzz"), "no option --zzz"),
        (("--resume",), "--config-file"),
        ((*FILE, "--device"), "--device"),
    ],
)
def test_bad_flags(argv, part):
    with pytest.raises(UserError, match=part):
        parse_options(argv)


def test_help_lists_flags_and_keys_that_exist(cfg, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--config-file", "--eval-only", "--fast-dev-run", "--dummy", "--profile"):
        assert flag in text
    keys = set(config_keys(cfg))
    for key in arguments.COMMON_KEYS:
        assert key in text
        assert key in keys, f"{key} is in the help, but not in {NAME}"


def test_overrides_change_the_config(cfg):
    texts = [
        "train.dist.tensor_parallel_size=2",
        "optim.lr=1",
        "optim.betas=[0.9,0.95]",
        "train.output_dir=2024",
        "train.train_micro_batch_size=null",
        "train.amp.enabled=false",
        "model.cfg.max_seq_length=77",
        "dataloader.train.dataset.0.data_prefix=some/where",
        "+extra.key=1",
    ]
    apply_overrides(cfg, texts, NAME)
    assert cfg.train.dist.tensor_parallel_size == 2
    assert cfg.optim.lr == 1.0
    assert isinstance(cfg.optim.lr, float)
    assert list(cfg.optim.betas) == [0.9, 0.95]
    assert cfg.train.output_dir == "2024"
    assert cfg.train.train_micro_batch_size is None
    assert cfg.train.amp.enabled is False
    assert cfg.extra.key == 1
    # One key each for what is used in several places.
    assert cfg.dataloader.train.dataset[0].max_seq_length == 77
    assert cfg.dataloader.train.dataset[0].indexed_dataset.data_prefix == "some/where"
    # Keys beside the changed one are as they were: upstream loses this one (spec 3.9, U).
    assert cfg.train.dist.pipeline_num_layers == cfg.model.cfg.num_layers


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.dist.tensor_paralel_size=2", ("did you mean train.dist.tensor_parallel_size",)),
        ("lr=2", ("did you mean optim.lr?",)),
        ("train.train_iter=many", ("train.train_iter='many'", "a whole number")),
        ("train.train_iter=1.5", ("a whole number",)),
        ("train.train_iter=true", ("train.train_iter=true", "a whole number")),
        ("train.train_iter=null", ("train.train_iter=null", "a whole number")),
        ("graph.enabled=1", ("graph.enabled=1: it must be true or false",)),
        ("train.dist=2", ("a group of keys", "tensor_parallel_size")),
        ("train.dist={tensor_size:2}", ("no key train.dist.tensor_size", "did you mean")),
        # These are not in the schema, but in the config.
        ("optim.betas=0.9", ("optim.betas=0.9: it must be a list",)),
        ("optim.lr=high", ("optim.lr='high': it must be a number",)),
        ("optim.lr=null", ("optim.lr=null",)),
        ("optim.eps=true", ("optim.eps=true: it must be a number",)),
        ("optim.do_bias_correction=1", ("true or false",)),
        ("graph.debug=0.5", ("a whole number",)),
        ("graph.debug=true", ("graph.debug=true: it must be a whole number",)),
        ("dataloader.train.dataset.0=2", ("a group of keys",)),
        ("dataloader.train.dataset.3.max_seq_length=7", ("no key",)),
        ("dataloader.train.dataset.x.path=7", ("dataset.x.path=7", "not an int")),
        ("train.seed", ("KEY=VALUE",)),
        ("~train.seed", ("train.seed=null",)),
        ("+train.seed=1", ("leave out the '+'",)),
        ("train.seed=1,2", ("[1,2]",)),
        ("train.output_dir=a=b", ("quotes",)),
    ],
)
def test_bad_overrides(cfg, text, parts):
    before = OmegaConf.to_yaml(cfg.train)
    with pytest.raises(UserError) as error:
        apply_overrides(cfg, [text], NAME)
    for part in parts:
        assert part in str(error.value)
    assert OmegaConf.to_yaml(cfg.train) == before


def test_null_is_taken_wherever_a_config_says_what_it_means():
    """Those null in the common configs may be null again: gpt2_small_cpu sets train.max_minutes."""
    common = load_config(str(FOLDER / NAME))
    keys = [key for key in config_keys(common) if OmegaConf.select(common, key) is None]
    keys = [key for key in keys if not key.endswith(("._target_", "tokenizer"))]
    assert {"train.max_minutes", "train.evaluation.patience"} <= set(keys)
    small = load_config(str(FOLDER / "gpt2_small_cpu.py"))
    for value in (3, {"a": 1}):
        for key in keys:
            OmegaConf.update(small, key, value, merge=False)
        apply_overrides(small, [f"{key}=null" for key in keys], "gpt2_small_cpu.py")
        assert [OmegaConf.select(small, key) for key in keys] == [None] * len(keys)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file"),
        ("train = dict(\n", "config.py, line 1: SyntaxError"),
        ("a = 1\nb = c\n", "config.py, line 2: NameError"),
        ("from .nothing import train\n", "nothing"),
    ],
)
def test_bad_config_files(tmp_path, content, part):
    file = tmp_path / "config.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=part):
        load_config(str(file))


def test_values_of_the_upstream_config(cfg):
    """Spec 3.5, but for what 3.9 says must not be copied."""
    model = cfg.model.cfg
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    assert [model[name] for name in (*sizes, "max_seq_length")] == [12, 768, 3072, 12, 1024]
    assert model.activation == "gelu_tanh"
    assert model.apply_query_key_layer_scaling is False
    optim = cfg.optim
    assert (optim.lr, optim.weight_decay, optim.eps) == (5e-5, 0.01, 1e-8)
    assert optim.params.clip_grad_max_norm == 1.0
    train = cfg.train
    assert (train.train_epoch, train.train_iter, train.log_period) == (33, 10000, 50)
    assert (train.checkpointer.period, train.checkpointer.max_to_keep) == (8000, 20)
    assert (train.evaluation.eval_period, train.evaluation.eval_iter) == (4000, 250)
    assert train.scheduler._target_.__name__ == "WarmupExponentialLR"
    assert list(cfg.dataloader.train.splits[0]) == [949, 50, 1]
    # T: no test set that is on one machine only.
    assert not cfg.dataloader.test
