"""The command line and the layouts that it chooses."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

from oneflow_accel.errors import UserError

import pytest

from libai_projects.generation import GenerationOptions
from libai_projects.inference.options import (
    FOR_CALLERS,
    SAMPLING,
    Layout,
    build_parser,
    choose_layout,
    given_sampling_options,
    limits_of,
    parse_options,
)
from libai_projects.inference.pipeline import model_name
from libai_projects.inference.requests import Limits
from libai_projects.weights.libai_checkpoints import detect_mode, find_model


def parse(*argv: str):
    return parse_options(argv)


def test_every_option_of_generation_has_one_here() -> None:
    assert list(GenerationOptions.model_fields) == [*SAMPLING, *FOR_CALLERS]
    text = build_parser().format_help()
    words = " ".join(text.split())
    for name in SAMPLING:
        assert f"--{name.replace('_', '-')}" in words
    assert "prompt included (default: 50)" in words
    assert "0: all (default: 50)" in words


def test_sampling_options_are_those_given() -> None:
    assert given_sampling_options(parse("1")) == {}
    given = given_sampling_options(
        parse(
            "--do-sample", "--no-use-cache", "--top-p", "0.9", "--num-beams=4", "--eos-token-id",
            "1,2", "--early-stopping", "never", "--exponential-decay-length-penalty", "20,1.05",
            "--seed", "7", "--max-time", "2", "--bos-token-id", "3", "--suppress-tokens", "4",
            "--bad-words-ids", "1,2;3", "--min-new-tokens", "2", "--min-p", "0.1",
        )
    )  # fmt: skip
    assert given == {
        "do_sample": True,
        "use_cache": False,
        "top_p": 0.9,
        "num_beams": 4,
        "eos_token_id": (1, 2),
        "early_stopping": "never",
        "exponential_decay_length_penalty": (20, 1.05),
        "seed": 7,
        "max_time": 2.0,
        "bos_token_id": 3,
        "suppress_tokens": 4,
        "bad_words_ids": [(1, 2), (3,)],
        "min_new_tokens": 2,
        "min_p": 0.1,
    }
    options = GenerationOptions.from_config(given)
    assert (options.suppress_tokens, options.bad_words_ids) == ((4,), ((1, 2), (3,)))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--top-k", "x"], "'top_k' must be a whole number from 0 to 2147483647 or null, got 'x'"),
        (["--top-k", "1;2"], "'top_k' must be a whole number .*, got '1;2'"),
        (["--num-beams", "4.0"], "'num_beams' must be a whole number"),
        (["--temperature", "true"], "'temperature' must be a number"),
        (["--max-time", "nan"], "'max_time' must be a number above 0"),
        (["--suppress-tokens", "1,"], "'suppress_tokens' must be .* or a list of them"),
        (["--bad-words-ids", "1,2;"], "'bad_words_ids' must be a list of lists"),
        (["--early-stopping", "yes"], "'early_stopping' must be true, false or 'never'"),
        (["--exponential-decay-length-penalty", "20"], "new tokens after which it starts"),
    ],
)
def test_refuses_values_that_an_option_does_not_take(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        GenerationOptions.from_config(given_sampling_options(parse(*argv)))


def test_order_does_not_matter() -> None:
    options = parse(
        "a.b=1", "--prompt", "x=y", "1", "--tensor-parallel", "2", "c=2", "--prompt", "z"
    )
    assert options.overrides == ["a.b=1", "c=2"]
    assert options.prompt == ["x=y", "z"]
    assert options.tensor_parallel == 2
    assert limits_of(options) == Limits()
    assert limits_of(parse("--limit-seconds", "3.5", "--limit-queue", "2")) == Limits(
        seconds=3.5, queue=2
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--promt", "a"], "did you mean --prompt"),
        (["a dog"], "--prompt 'a dog'"),
        (["--mode", "random", "--model", "x"], "needs no --model"),
        (["--mode", "other"], "invalid choice"),
        (["--jsonl", "--interactive"], "not allowed with"),
        (["--serve", "--prompt", "a"], "not allowed with"),
        (["--serve", "--temperature", "2"], "--temperature is set by each request"),
        (["--jsonl", "--batch-size", "2"], "--batch-size is for --prompt only"),
        (["--port", "70000"], "--port 70000: it must be a whole number from 0 to 65535"),
        (
            ["--tensor-parallel", "0"],
            "--tensor-parallel 0: it must be a whole number of at least 1",
        ),
        (["--limit-seconds", "nan"], "--limit-seconds nan: it must be a number above 0"),
        (["--prompt"], "expected one argument"),
    ],
)
def test_refuses(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("processes", "sizes", "layout"),
    [
        (1, {}, Layout(1, 1, 1)),
        (2, {}, Layout(1, 2, 1)),
        (3, {}, Layout(1, 1, 3)),
        (4, {}, Layout(1, 2, 2)),
        (8, {}, Layout(1, 2, 4)),
        (4, {"tensor": 4}, Layout(1, 4, 1)),
        (4, {"tensor": 2}, Layout(1, 2, 2)),
        (4, {"pipeline": 4}, Layout(1, 1, 4)),
        (4, {"data": 2}, Layout(2, 2, 1)),
        (4, {"tensor": 1, "pipeline": 1}, Layout(4, 1, 1)),
        (4, {"tensor": 2, "pipeline": 2}, Layout(1, 2, 2)),
        (8, {"tensor": 2, "pipeline": 2, "data": 2}, Layout(2, 2, 2)),
    ],
)
def test_layouts(processes: int, sizes: dict[str, int], layout: Layout) -> None:
    assert choose_layout(processes, **sizes) == layout


@pytest.mark.parametrize(
    ("processes", "sizes", "needed"),
    [
        (4, {"tensor": 3}, 3),
        (1, {"tensor": 2, "pipeline": 2}, 4),
        (4, {"tensor": 2, "pipeline": 1, "data": 1}, 2),
    ],
)
def test_layouts_that_do_not_fit(processes: int, sizes: dict[str, int], needed: int) -> None:
    with pytest.raises(UserError, match=f"--nproc_per_node {needed}"):
        choose_layout(processes, **sizes)
    with pytest.raises(UserError, match="at least 1"):
        choose_layout(4, tensor=0)


def test_finds_the_model_that_a_path_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("model_0000009", "model_0000019", "model_final"):
        (run / name / "model").mkdir(parents=True)
        (run / name / "model" / "pickled_data").write_bytes(b"")
    (run / "last_checkpoint").write_text("model_0000019")
    # The newer of the two.
    os.utime(run / "model_final", (1, 1))
    assert find_model(run) == run / "model_0000019"
    os.utime(run / "model_0000019", (0, 0))
    assert find_model(run) == run / "model_final"
    assert find_model(run / "model_0000009") == run / "model_0000009"
    assert find_model(run / "model_0000009" / "model") == run / "model_0000009" / "model"
    (run / "model_0000009").rename(run / "model_best")
    assert find_model(run) == run / "model_best"
    assert detect_mode(run) == "libai"
    # A run that went on here, and has had no evaluation yet.
    newer = run / "checkpoints"
    for step in ("step-00000025", "step-00000030"):
        (newer / step).mkdir(parents=True)
        (newer / step / "state.json").write_text("{}")
    (newer / "latest").write_text("step-00000030\n")
    assert find_model(run) == find_model(newer) == newer / "step-00000030"
    (newer / "best").write_text("step-00000025\n")
    assert find_model(run) == find_model(newer) == newer / "step-00000025"
    # Names of a checkpoint itself stay; whoever reads it knows them.
    for path in (newer / "step-00000030", newer / "step-00000030" / "model", newer / "best"):
        assert find_model(path) == path
        assert detect_mode(path) == "libai"
    with pytest.raises(UserError, match="holds no model"):
        find_model(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({}))
    assert detect_mode(tmp_path / "hf") == "huggingface"
    assert model_name(newer / "step-00000030") == run.name
    assert model_name(tmp_path / "hf") == "hf"
    with pytest.raises(UserError, match="--mode huggingface"):
        find_model(tmp_path / "hf")
    with pytest.raises(UserError, match="nothing of that name"):
        detect_mode(tmp_path / "missing")


def test_the_pipeline_is_called_as_upstream_calls_it() -> None:
    """libai_spec 3.3: both names, the arguments in their order, modes."""
    from libai_projects.projects.MagicPrompt import pipeline

    assert pipeline.MagicPromptPipeline is pipeline.TextGenerationPipeline
    parameters = inspect.signature(pipeline.TextGenerationPipeline).parameters
    assert list(parameters)[:9] == [
        "config_file", "data_parallel", "tensor_parallel", "pipeline_parallel",
        "pipeline_stage_id", "pipeline_num_layers", "model_path", "mode", "device",
    ]  # fmt: skip
    assert parameters["mode"].default == "libai"
    with pytest.raises(NotImplementedError, match="huggingface, libai, random"):
        pipeline.TextGenerationPipeline(pipeline.CONFIG_FILE, mode="onnx")
    call = inspect.signature(pipeline.TextGenerationPipeline.__call__).parameters
    assert list(call)[:3] == ["self", "inputs", "batch_size"]
