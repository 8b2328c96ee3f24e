"""pretrain.py: its flags, its learning rate, and runs of a tiny Llama as a user types them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oneflow_accel.errors import UserError
from oneflow_accel.kernels import registry

import numpy as np
import oneflow as flow
import pytest

from flow_train.config.compose import parse_override
from flow_train.metrics.log import read_metrics
from libai_projects import weights
from libai_projects.command.config import load_config
from libai_projects.command.output import checkpoint_bytes
from libai_projects.projects.Llama import flags as flag_table
from libai_projects.projects.Llama import pretrain
from libai_projects.projects.Llama.schedule import warmup_cosine
from libai_projects.weights.llama import LLAMA
from tests.command_server import CommandServer
from tests.launch import REPOSITORY, run_distributed
from tests.libai_projects.magicprompt.gpt2_models import LAYER
from tests.libai_projects.train.conftest import (
    as_after_step_three,
    losses,
    metrics,
    perplexities,
)

SCRIPT = REPOSITORY / "libai_projects" / "projects" / "Llama" / "pretrain.py"
ENVIRONMENT = {"ONEFLOW_ACCEL_THREADS": "1"}
# Tokens of a sequence of --preset=tiny, and ids of the files below.
LENGTH, IDS = 128, 500
FIELDS = flag_table.Options.model_fields
NUMBERS = [name for name, field in FIELDS.items() if type(field.default) in (int, float)]
END = 0
TINY = (
    *("--preset=tiny", "--batch_size=1", "--gradient_accumulation_steps=2", "--num_workers=0"),
    *("--learning_rate=3e-3", "--warmup_iters=2", "--lr_decay_iters=4", "--eval_iters=2"),
)


def parse(*argv: str) -> Any:
    return flag_table.parse(argv)


def settings(*argv: str) -> dict[str, Any]:
    """What the overrides say, as the config reads them."""
    texts = [parse_override(text, "") for text in flag_table.overrides(parse(*argv))]
    return {each.key_or_group: each.value() for each in texts}


# Flags ---------------------------------------------------------------------------------------


def test_the_defaults_are_the_diarys() -> None:
    found = settings("--batch_size=2", "--gradient_accumulation_steps=16")
    assert found == settings()
    for key, value in {
        "model.cfg.vocab_size": 64320,
        "model.cfg.hidden_size": 2048,
        "model.cfg.ffn_hidden_size": 5632,
        "model.cfg.num_layers": 22,
        "model.cfg.num_attention_heads": 32,
        "model.cfg.num_key_value_heads": 8,
        "model.cfg.max_seq_length": 2048,
        "model.cfg.rms_norm_epsilon": 1e-5,
        "model.cfg.rope_theta": 1e4,
        "model.cfg.initializer_range": 0.02,
        "model.cfg.residual_in_fp32": True,
        "optim.lr": 4e-4,
        "optim.betas": [0.9, 0.95],
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.1,
        "optim.params.clip_grad_max_norm": 1.0,
        "train.scheduler.warmup_iters": 2000,
        "train.scheduler.decay_iters": 100000,
        "train.scheduler.alpha": 0.1,
        "train.seed": 1337,
    }.items():
        assert found[key] == value, key


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch_sise=3"], "there is no option --batch_sise; did you mean --batch_size?"),
        (["--qqq"], "there is no option --qqq; --help lists the options"),
        (["3"], "'3' is one argument too many"),
        (["--batch_size=x"], "--batch_size x: it must be a whole number from 1 to 2147483647"),
        (["--learning_rate=high"], "--learning_rate high: it must be a number from 0 to"),
        (["--use_flash=maybe"], "--use_flash maybe: it must be true or false"),
        (["--preset=tinny"], "did you mean tiny?"),
        (["--dtype=int8"], "precision 'int8' is none of float32, float32-bf16-pro"),
        (["--dropout1=0.1"], "--dropout1 and --dropout2 differ, and both branches of a block"),
        (["--zero_stage=4"], "--zero_stage 4: it must be a whole number from 0 to 3"),
        (["--attn_impl=fmha"], "--attn_impl=fmha: OneFlow's fused attention has no gradient"),
        (["--min_lr=1"], "--min_lr=1.0 is above --learning_rate=0.0004"),
    ],
)
def test_wrong_flags(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["9" * 500, "-2", "nan"])
def test_numbers_that_cannot_be(value: str) -> None:
    for name in NUMBERS:
        with pytest.raises(UserError, match=f"--{name}"):
            parse(f"--{name}={value}")


def test_a_bare_flag_means_true() -> None:
    assert not parse().tie_word_embeddings
    assert parse("--tie_word_embeddings").tie_word_embeddings
    assert parse("--dummy", "--resume", "--batch_size=3").batch_size == 3
    for text, value in (("true", True), ("0", False), ("No", False), ("YES", True)):
        assert parse(f"--use_flash={text}").use_flash is value
        assert parse("--use_flash", text).use_flash is value


def test_other_names_of_flags() -> None:
    """llm-zero2all's and others'; the last of several counts, and a preset does not."""
    aliases = 0
    for name, field in FIELDS.items():
        value = {bool: True, int: 4, float: 0.25, str: "bfloat16"}.get(type(field.default))
        for alias in field.json_schema_extra["names"]:
            assert vars(parse("--preset=tiny", f"{alias}={value}"))[name] == value
            if alias != f"--{name}":
                given = parse("--preset=tiny", f"--{name}={field.default}", f"{alias}={value}")
                assert vars(given)[name] == value
                aliases += 1
    assert aliases == 17
    assert parse("--compile").graph
    assert parse("--dtype=bf16").precision == "bfloat16"
    assert parse("--dropout1=0.1", "--dropout2=0.1").dropout == 0.1
    logged = settings("--wandb_log", "--wandb_run_name=a b")["train.logger.wandb"]
    assert logged == {"project": "z2all", "name": "a b"}
    assert "train.logger.wandb" not in settings()


def test_micro_batches_of_a_step_are_shared_by_processes() -> None:
    """As llm-zero2all counts them, which divides by its processes; our own name does not."""
    for argv, processes, steps in (((), 4, 4), (("--num_accumulation_steps=3",), 4, 3)):
        assert flag_table.accumulation_steps(parse(*argv), processes) == steps
    with pytest.raises(UserError, match="steps=16 does not divide by 3"):
        flag_table.accumulation_steps(parse(), 3)


def test_presets_and_flags_beside_them() -> None:
    tiny = parse("--preset=tiny")
    assert (tiny.hidden_size, tiny.num_layers, tiny.vocab_size) == (128, 2, 512)
    # Before the preset or after it, and also where the value is the usual default.
    for argv in (["--num_layers=22", "--preset=tiny"], ["--preset=tiny", "--num_layers=22"]):
        assert parse(*argv).num_layers == 22
        assert parse(*argv).hidden_size == 128
    assert parse("--preset", "llama3_8b").rope_theta == 500000.0
    # What a preset does not say has the usual default.
    assert parse("--preset=tinyllama").num_layers == 22


@pytest.mark.parametrize(("size", "padded"), [(64320, 64320), (64321, 64328), (1, 8)])
def test_vocabulary_is_padded_to_a_multiple_of_eight(size: int, padded: int) -> None:
    flags = parse(f"--vocab_size={size}")
    assert settings(f"--vocab_size={size}")["model.cfg.vocab_size"] == padded
    line = f"vocabulary: {size} tokens, padded to {padded}, a multiple of 8"
    assert (line in pretrain.describe(flags, of_batch(32))) == (size != padded)


@pytest.mark.parametrize(
    ("width", "multiple", "inner"),
    [(2048, 256, 5632), (4096, 256, 11008), (128, 1, 341)],
)
def test_inner_width(width: int, multiple: int, inner: int) -> None:
    argv = [f"--hidden_size={width}", f"--multiple_of={multiple}"]
    key = "model.cfg.ffn_hidden_size"
    assert settings(*argv, "--ffn_hidden_size=0")[key] == inner
    assert settings(*argv, "--ffn_hidden_size=777")[key] == 777


def of_batch(size: int) -> Any:
    return SimpleNamespace(train=SimpleNamespace(global_batch_size=size))


def test_tokens_per_iteration() -> None:
    flags = parse()
    # The diary's line has this number, which four processes take.
    assert pretrain.describe(flags, of_batch(128))[0].startswith(
        "tokens per iteration: 262,144 = 16 gradient accumulation steps x 4 data-parallel processes"
    )


def test_operations_that_are_switched_off() -> None:
    assert flag_table.disabled(parse()) == []
    argv = ("--use_flash=false", "--use_fused_swiglu=false", "--disable= rope ,swiglu,")
    off = ["rope", "scaled_dot_product_attention", "swiglu"]
    assert flag_table.disabled(parse(*argv)) == off
    assert pretrain.describe(parse(*argv), of_batch(32))[1] == f"switched off: {', '.join(off)}"
    for flag, names in flag_table.FUSED.items():
        assert set(names) <= set(registry.operations())
        assert flag_table.disabled(parse(f"--{flag}=false")) == sorted(names)
    assert flag_table.disabled(parse("--attn_impl=naive")) == ["scaled_dot_product_attention"]
    assert flag_table.disabled(parse("--attn_impl=chunked")) == []


@pytest.mark.parametrize(
    "text",
    ["", 'a\\"b', "ends\\", "ü, [1] {a: b} #$c = 'x'", "null", " a "],
)
def test_paths_reach_the_config_as_they_are(text: str) -> None:
    assert settings(f"--output_dir={text}")["train.output_dir"] == text
    assert parse_override(f"key={flag_table.quoted(text)}", "").value() == text


def test_optional_settings() -> None:
    plain = settings()
    assert "model.cfg.rope_scaling" not in plain
    assert "model.cfg.pad_token_id" not in plain
    assert plain["train.zero_optimization.enabled"] is False
    found = settings(
        *("--rope_scaling=llama3", "--rope_factor=8", "--rope_original_len=8192"),
        *("--pad_token_id=3", "--grad_clip=0", "--zero_stage=2", "--min_lr=1e-4"),
        "--lr_decay_iters=500",
    )
    # Of Llama 3.1's config.json.
    assert found["model.cfg.rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert found["model.cfg.pad_token_id"] == 3
    assert found["optim.params.clip_grad_max_norm"] is None
    assert found["train.zero_optimization.stage"] == 2
    assert found["train.scheduler.alpha"] == pytest.approx(0.25)
    assert found["train.scheduler.decay_iters"] == 500


# The learning rate ---------------------------------------------------------------------------


def nanogpts(step: int, warmup: int, decay: int, least: float) -> float:
    """The share of the largest rate at a step, from 0 on."""
    if step < warmup:
        return (step + 1) / warmup
    if step >= decay:
        return least
    done = (step - warmup) / (decay - warmup)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))


def schedule_of(**options: Any) -> Any:
    optimizer = flow.optim.AdamW([flow.nn.Parameter(flow.zeros(1))], lr=4e-4)
    return warmup_cosine(optimizer, max_iter=0, warmup_iter=0, **options)


@pytest.mark.parametrize(("warmup", "decay", "least"), [(5, 20, 0.1), (0, 10, 0.5), (4, 4, 1)])
def test_schedule_is_nanogpts(warmup: int, decay: int, least: float) -> None:
    schedule = schedule_of(warmup_iters=warmup, decay_iters=decay, alpha=least)
    for step in range(decay + 5):
        expected = 4e-4 * nanogpts(step, warmup, decay, least)
        assert schedule.get_last_lr()[0] == pytest.approx(expected, rel=1e-12), step
        schedule.step()


# Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 sequences and a token, 5 held out, each token a little above the one before; without a
    .json."""
    draw = np.random.default_rng(0)
    # No pattern, although it has a bracket; and hydra would read the rest.
    folder = tmp_path_factory.mktemp("tökens [1], {a}")
    for name, sequences in (("a", 40), ("a_valid", 5)):
        ids = np.cumsum(draw.integers(1, 8, sequences * LENGTH + 1)) % IDS
        ids.astype("<u2").tofile(folder / f"{name}.bin")
    return folder / "a.bin"


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    module = "tests.libai_projects.llama.pretrain_command"
    with CommandServer(module, forks=True, env=ENVIRONMENT) as running:
        yield running


Run = Callable[..., str]


@pytest.fixture(scope="module")
def train(server: CommandServer, data: Path) -> Run:
    """Runs pretrain.py on a tiny model, and gives what it printed; in a process that was forked
    where that is enough."""

    def run(out: Path, *argv: object, code: int = 0, processes: int = 1, data: Path = data) -> str:
        files = (f"--data={data}", f"--output_dir={out}")
        given = [*TINY, *files, "--max_iters=4", *map(str, argv)]
        if processes > 1:
            result = run_distributed([SCRIPT, *given], processes, env=ENVIRONMENT)
        else:
            result = server.run(given, cwd=REPOSITORY)
        assert result.returncode == code, result.stdout
        assert "Traceback" not in result.stdout
        return result.stdout

    return run


@pytest.fixture(scope="module")
def whole(train: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four steps in one go, with evaluations after the second and the last: the folder, and what
    was printed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, train(out, "--eval_interval=2")


def test_a_run(data: Path, whole: tuple[Path, str]) -> None:
    out, printed = whole
    assert (
        "tokens per iteration: 256 = 2 gradient accumulation steps x 1 data-parallel processes x "
        "batch size 1 x 128 tokens" in printed
    )
    assert "padded to" not in printed
    assert "switched off" not in printed
    assert "4 iterations, warm-up over 2 of them" in printed
    assert "warmup_iter=0" not in printed + (out / "log.txt").read_text()
    assert f"validation is on {data.with_name('a_valid.bin')}" in printed
    # (2 x embedding) + 2 x (attention with half the keys, SwiGLU, two norms) + the last norm.
    count = 2 * 512 * 128 + 2 * (3 * 128 * 128 + 3 * 128 * 512 + 2 * 128) + 128
    assert f"LlamaForPreTraining of {count:,} weights" in printed
    files = [path for path in (out / "checkpoints" / "step-00000004").rglob("*") if path.is_file()]
    foreseen = checkpoint_bytes(load_config(str(out / "config.yaml")))
    assert foreseen == count * 3 * 4
    assert foreseen == pytest.approx(sum(path.stat().st_size for path in files), rel=0.02)
    curve = losses(out)
    assert list(curve) == [1, 2, 3, 4]
    # From about ln 512, what guessing costs, downwards.
    assert curve[1] == pytest.approx(math.log(512), abs=0.1)
    assert curve[4] < curve[1] - 0.1
    assert perplexities(out)[4] < perplexities(out)[2] < 512
    evaluated = [line for line in metrics(out) if "validation/lm_loss_tokens" in line]
    assert [line["validation/lm_loss_tokens"] for line in evaluated] == [5 * LENGTH] * 2
    rates = [line["lr"] for line in metrics(out) if "lr" in line]
    assert rates == pytest.approx([3e-3 * nanogpts(step, 2, 4, 0.1) for step in range(4)])


def test_resumed_run_equals_whole_one_to_the_last_bit(
    train: Run, whole: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = whole
    # As a restart loop has it: --resume from the first start on.
    resumed = ("--eval_interval=2", "--resume")
    train(tmp_path / "out", "--max_iters=2", "--save_interval=2", *resumed)
    assert list(losses(tmp_path / "out")) == [1, 2]
    train(tmp_path / "out", *resumed)
    assert losses(tmp_path / "out") == losses(out)
    assert perplexities(tmp_path / "out") == perplexities(out)
    expected, _ = weights.load(out / "checkpoints" / "latest", "libai", table=LLAMA)
    found, _ = weights.load(tmp_path / "out" / "checkpoints" / "latest", "libai", table=LLAMA)
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


FACTORED = ("--mlp_cfg=monarch", "--attnlinear_cfg={_target_: blockdiag, nblocks: 2}")
FACTORED += ("--attnproj_cfg=monarch", "--eval_interval=2", "--save_interval=3")


@pytest.fixture(scope="module")
def dense_late(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Structured for two of four steps, dense from then on."""
    out = tmp_path_factory.mktemp("late") / "out"
    printed = train(out, *FACTORED, "--sparse_to_dense=0.5")
    # Factors of 4 blocks of the widths 128 and 512, and 2 blocks where there were keys.
    mlp = 2 * 4 * (32 * 32 + 128 * 32) + 4 * (32 * 128 + 32 * 32)
    attention = (128 * 128 + 2 * 128 * 64) // 2 + 2 * 4 * 32 * 32
    count = 2 * 512 * 128 + 2 * (mlp + attention + 2 * 128) + 128
    assert f"LlamaForPreTraining of {count:,} weights" in printed
    return out


def test_structured_layers_become_dense_and_compute_the_same(train: Run, dense_late: Path) -> None:
    lines = read_metrics(dense_late / "metrics.jsonl")
    (switch,) = (line["values"] for line in lines if line["split"] == "switch")
    assert switch["loss_after"] == pytest.approx(switch["loss_before"], abs=1e-5)
    assert losses(dense_late)[4] < losses(dense_late)[1] - 0.05
    found, config = weights.load(dense_late / "checkpoints" / "latest", "libai", table=LLAMA)
    assert "mlp_cfg" not in config
    assert found["llama.layers.0.mlp.down_proj.weight"].shape == (512, 128)


@pytest.mark.parametrize("fraction", [0.5, 0.75])
def test_a_run_goes_on_after_that_and_before(
    fraction: float, train: Run, dense_late: Path, tmp_path: Path
) -> None:
    argv, whole = (*FACTORED, f"--sparse_to_dense={fraction}"), dense_late
    if fraction > 0.5:
        whole = tmp_path / "whole"
        train(whole, *argv)
        # The weights say so, not the settings.
        _, config = weights.load(whole / "checkpoints/step-00000003", "libai", table=LLAMA)
        assert config["mlp_cfg"] == {"_target_": LAYER, "nblocks": 4}
        assert config["ffn_hidden_size"] == 512
    out = as_after_step_three(whole, tmp_path / "out")
    train(out, *argv, "--resume")
    assert losses(out) == losses(whole)
    assert perplexities(out) == perplexities(whole)


@pytest.mark.release
def test_that_under_nn_graph_and_tensor_parallelism(
    train: Run, dense_late: Path, tmp_path: Path
) -> None:
    argv = ("--sparse_to_dense=0.5", "--graph", "--tensor_parallel=2")
    train(tmp_path / "out", *FACTORED, *argv, processes=2)
    assert losses(tmp_path / "out") == pytest.approx(losses(dense_late), rel=1e-5)
    assert perplexities(tmp_path / "out") == pytest.approx(perplexities(dense_late), rel=1e-5)


@pytest.mark.release
def test_two_processes_under_nn_graph_train_as_one(
    train: Run, whole: tuple[Path, str], tmp_path: Path
) -> None:
    # Of the two that TINY has, each process does one, as llm-zero2all counts them.
    printed = train(tmp_path / "out", "--eval_interval=2", "--graph", processes=2)
    assert "LlamaForPreTraining, nn.Graph: " in printed
    assert "--gradient_accumulation_steps=2 are 1 in each of these processes" in printed
    assert (
        "tokens per iteration: 256 = 1 gradient accumulation steps x 2 data-parallel processes x "
        "batch size 1 x 128 tokens" in printed
    )
    for line, expected in zip(metrics(tmp_path / "out"), metrics(whole[0]), strict=True):
        assert line.get("lr") == pytest.approx(expected.get("lr"))
    assert losses(tmp_path / "out") == pytest.approx(losses(whole[0]), rel=0, abs=1e-5)
    # Of its logarithm, the mean loss.
    assert perplexities(tmp_path / "out") == pytest.approx(perplexities(whole[0]), rel=1e-5)


def test_packed_documents(train: Run, data: Path, tmp_path: Path) -> None:
    """With the data's vocabulary, other files to evaluate on, and some operations off."""
    ids = np.fromfile(data, "<u2")
    ids[20::50] = END
    said = {"dtype": "uint16", "documents": int((ids == END).sum()), "vocab_size": IDS}
    said |= {"tokenizer": "t", "eod_id": END}
    for name, count in (("a", 20), ("other", 3)):
        ids[: count * LENGTH + 1].tofile(tmp_path / f"{name}.bin")
        content = json.dumps({**said, "tokens": count * LENGTH + 1})
        (tmp_path / f"{name}.json").write_text(content)
    argv = ("--packing=documents", "--vocab_size=0", f"--val_data={tmp_path / 'other.bin'}")
    argv += ("--max_iters=2", "--eval_interval=2", "--use_fused_rope=false")
    printed = train(tmp_path / "out", *argv, data=tmp_path / "a.bin")
    assert "vocabulary: 500 tokens, padded to 504, a multiple of 8" in printed
    assert "switched off: rope" in printed
    assert f"validation is on {tmp_path / 'other.bin'}" in printed
    assert losses(tmp_path / "out")[1] == pytest.approx(math.log(504), abs=0.1)
    # The token that ends a document says nothing of the next one's first.
    ends = int((ids[: 3 * LENGTH] == END).sum())
    assert ends == 8
    found = [line for line in metrics(tmp_path / "out") if "validation/lm_loss_tokens" in line]
    assert [line["validation/lm_loss_tokens"] for line in found] == [3 * LENGTH - ends]


def test_what_the_user_can_mend(
    train: Run, data: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Each says what was wrong, and leaves the run that is in the folder alone."""
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    before = sorted(path.relative_to(out) for path in out.rglob("*"))
    large, cut, missing = (tmp_path / f"{name}.bin" for name in ("large", "cut", "none"))
    ids = np.fromfile(data, "<u2")
    ids[1234] = 512
    ids.tofile(large)
    cut.write_bytes(data.read_bytes()[:-1])
    for argv, message in (
        (("--data=",), "--data names no token file: make one by prepare.py, or give --dummy"),
        ((f"--val_data={missing}",), f"there is no token file at '{missing}'"),
        ((f"--data={large}",), "token 1234 has the id 512, and the model's vocabulary ends at 511"),
        ((f"--data={cut}",), f"cut.bin has {2 * len(ids) - 1:,} bytes, and a multiple of 2"),
        (("--packing=documents",), "no .json that says which token ends a"),
        (("--vocab_size=0",), "--vocab_size=0 takes the data's, which have no"),
        (("--dtype=float16",), "--precision=float16: cpu cannot do this: CPUs have"),
        (("--disable=rope,swigloo",), "'swigloo'. Did you mean 'swiglu'?"),
    ):
        printed = train(out, *argv, code=UserError.EXIT_CODE)
        # Nothing before it; of two problems, such as of both files, each has a line.
        assert printed.startswith("pretrain.py: error: "), printed
        assert message in printed
        assert sorted(path.relative_to(out) for path in out.rglob("*")) == before


def test_help_shows_each_flag_with_its_default(train: Run, tmp_path: Path) -> None:
    shown = " ".join(train(tmp_path, "--help").split())
    assert "--preset {z2all,small,tiny," in shown
    for name, field in FIELDS.items():
        for group in field.json_schema_extra["group"]:
            assert f" {group}: " in shown
        default, kind = field.default, ""
        if isinstance(default, bool):
            default, kind = str(default).lower(), " [true|false]"
        assert f" --{name}{kind}" in shown
        told = "" if default is None else f" (default: {default})"
        assert f" {field.description}{told}" in shown
