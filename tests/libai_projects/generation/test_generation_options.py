"""Options from a configuration and from calls, and what is refused."""

from __future__ import annotations

from typing import Any

from oneflow_accel.errors import UserError

import pytest
from omegaconf import OmegaConf

from libai_projects.generation import GenerationOptions, generate
from tests.libai_projects.generation.numpy_gpt2 import NumpyGPT2

# The defaults that configurations of this project have always had.
DEFAULTS = {
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
    "use_cache": True,
    "pad_token_id": 0,
    "eos_token_id": 50256,
    "bos_token_id": 50256,
    "max_time": None,
    "max_new_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "prefix_allowed_tokens_fn": None,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "output_scores": False,
}


def test_defaults() -> None:
    options = dict(GenerationOptions())
    assert {name: options[name] for name in DEFAULTS} == DEFAULTS
    assert GenerationOptions.from_config(DEFAULTS) == GenerationOptions()


def test_a_call_overrides_the_configuration() -> None:
    config = OmegaConf.create(
        {
            "do_sample": True,
            "top_k": 40,
            "temperature": 1,
            "eos_token_id": [3, 4],
            "exponential_decay_length_penalty": [5, 1.5],
        }
    )
    options = GenerationOptions.from_config(config, top_k=7, max_new_tokens=9)
    assert (options.do_sample, options.top_k, options.temperature) == (True, 7, 1.0)
    assert options.eos_token_id == (3, 4)
    assert options.exponential_decay_length_penalty == (5, 1.5)
    assert config.top_k == 40


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "greedy"),
        ({"do_sample": True}, "sampling"),
        ({"num_beams": 2}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sampling"),
    ],
)
def test_mode(options: dict[str, Any], mode: str) -> None:
    assert GenerationOptions(**options).mode == mode


@pytest.mark.parametrize(
    ("name", "near"),
    [("temperatures", "temperature"), ("topk", "top_k"), ("max_new_token", "max_new_tokens")],
)
def test_a_misspelled_option_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"no generation option '{name}': did you mean '{near}'"):
        GenerationOptions.from_config({name: 1})
    with pytest.raises(UserError, match=f"did you mean '{near}'"):
        GenerationOptions.from_config(None, **{name: 1})


def test_an_option_like_no_other_gets_the_list() -> None:
    with pytest.raises(UserError, match="options are max_length, max_new_tokens"):
        GenerationOptions.from_config({"zzz": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "'temperature' must be a number above 0.*set do_sample to false"),
        ({"temperature": float("nan")}, "'temperature'"),
        ({"temperature": "hot"}, "'temperature'.*got 'hot'"),
        ({"top_k": -1}, "'top_k' must be a whole number from 0 to 2147483647 or null, got -1"),
        ({"top_k": 2.5}, "'top_k'"),
        ({"top_k": True}, "'top_k'"),
        ({"top_p": 0.0}, "'top_p' must be a number above 0 and of at most 1"),
        ({"top_p": 1.1}, "'top_p'"),
        ({"typical_p": -1.0}, "'typical_p'"),
        ({"min_p": 1.5}, "'min_p' must be a number from 0 to 1"),
        ({"min_new_tokens": -1}, "'min_new_tokens'"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens \(5\) is larger"),
        ({"suppress_tokens": "1"}, "'suppress_tokens'"),
        ({"suppress_tokens": [-1]}, "'suppress_tokens'"),
        ({"bad_words_ids": [[]]}, "'bad_words_ids' must be a list of lists.*none of them empty"),
        ({"bad_words_ids": [3]}, "'bad_words_ids'"),
        ({"bad_words_ids": "ab"}, "'bad_words_ids'"),
        ({"bad_words_ids": [["a"]]}, "'bad_words_ids'"),
        ({"repetition_penalty": 1e-300}, "'repetition_penalty' must be a number from 1e-06 to"),
        ({"length_penalty": -1e308}, "'length_penalty' must be a number from -100 to 100"),
        ({"temperature": 1e-300}, "'temperature' must be a number above 0, 1.18e-38 or more"),
        ({"repetition_penalty": 0.0}, "'repetition_penalty'"),
        ({"max_length": 0}, "'max_length' must be a whole number from 1 to 2147483647, got 0"),
        ({"max_new_tokens": 0}, "'max_new_tokens'"),
        ({"max_new_tokens": 2**31}, "from 1 to 2147483647 or null, got 2147483648"),
        ({"num_beams": 0}, "'num_beams'"),
        ({"do_sample": 1}, "'do_sample' must be true or false"),
        ({"early_stopping": "always"}, "'early_stopping' must be true, false or 'never'"),
        ({"eos_token_id": []}, "'eos_token_id'"),
        ({"eos_token_id": "50256"}, "'eos_token_id'"),
        ({"seed": None}, "'seed'"),
        ({"exponential_decay_length_penalty": [1]}, "new tokens after which it starts"),
        ({"exponential_decay_length_penalty": [1, -2]}, "new tokens after which it starts"),
        ({"logits_processor": [3]}, "'logits_processor' must be a list of functions"),
        ({"prefix_allowed_tokens_fn": 3}, "must be a function"),
        ({"max_time": 0}, "'max_time'"),
        ({"num_return_sequences": 3}, "greedy decoding has one result for a prompt"),
        ({"num_return_sequences": 3, "num_beams": 2}, "larger than num_beams"),
        ({"min_length": 21}, r"min_length \(21\) is larger than max_length \(20\)"),
        ({"num_beams": 4, "num_beam_groups": 2}, "not implemented"),
        ({"diversity_penalty": 0.5}, "not implemented"),
        (
            {"exponential_decay_length_penalty": [1, 1.1], "eos_token_id": None},
            "eos_token_id is null",
        ),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerationOptions.from_config(options)
    with pytest.raises(UserError, match=message):
        GenerationOptions().replace(**options)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompt"),
        ([[]], {"bos_token_id": None}, "prompt 0 is empty and bos_token_id is null"),
        ([[1], []], {"bos_token_id": 97}, "prompt 1 holds the token id 97"),
        ([[1], [97]], {}, "prompt 1 holds the token id 97.*0 to 96"),
        ([[1, -2]], {}, "token id -2"),
        ([[1.5]], {}, "not a list of token ids"),
        (["text"], {}, "not a list of token ids"),
        ([[1] * 20], {}, "prompt 0 has 20 tokens, but max_length.*set max_new_tokens"),
        ([[1], [1] * 64], {"max_new_tokens": 5}, "prompt 1 has 64 tokens.*64 positions"),
        ([[1] * 70], {"max_length": 100}, "70 tokens and the model has 64 positions"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "3 seeds were given for 2 prompts"),
        ([[1]], {"pad_token_id": 97}, "pad_token_id is 97.*97 tokens"),
        ([[1]], {"forced_eos_token_id": [3, 200]}, "forced_eos_token_id is 200"),
    ],
)
def test_refused_with_this_model(
    prompts: list[Any], options: dict[str, Any], message: str, model: NumpyGPT2
) -> None:
    with pytest.raises(UserError, match=message):
        generate(model, prompts, GenerationOptions(**options))
    assert model.steps == []


def test_an_empty_prompt_starts_with_bos(model: NumpyGPT2) -> None:
    options = GenerationOptions(bos_token_id=60)
    empty, with_bos = generate(model, [[], [60]], options).sequences
    assert empty.tokens == with_bos.tokens
