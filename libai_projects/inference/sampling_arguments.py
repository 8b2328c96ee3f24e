"""The options of generation as command-line options, one for each field of GenerationOptions."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from libai_projects.generation.options import GenerationOptions

# What --help says of each field. A field that is missing here gets no option: those are for callers
# in Python. tests/libai_projects/pipeline/test_options.py checks that each is in one of the two.
HELP = {
    "max_length": "longest text in tokens, prompt included",
    "max_new_tokens": "most new tokens; takes precedence over --max-length",
    "min_length": "no end of text while it is shorter than this, in tokens, prompt included",
    "min_new_tokens": "no end of text among the first so many new tokens; instead of --min-length",
    "do_sample": "draw tokens instead of taking the likeliest",
    "early_stopping": "when beam search ends: true (as many texts as beams are finished), false "
    "(a better one is unlikely), never (a better one is impossible)",
    "num_beams": "beams of beam search; 1: none",
    "num_beam_groups": "diverse beam search, which is not implemented: 1 only",
    "diversity_penalty": "diverse beam search, which is not implemented: 0 only",
    "temperature": "sampling: below 1 sharpens the distribution, above 1 flattens it",
    "top_k": "sampling: from the k likeliest tokens only; 0: all",
    "top_p": "sampling: from the likeliest tokens that together have this probability; 1: all",
    "min_p": "sampling: from the tokens with this share of the likeliest one's probability; 0: all",
    "typical_p": "sampling: from the most typical tokens that together have this probability; "
    "1: all",
    "repetition_penalty": "above 1: tokens that occurred become less likely",
    "length_penalty": "beam search: a text's score is divided by its new tokens to this power",
    "no_repeat_ngram_size": "no n-gram of this size occurs twice; 0: off",
    "bad_words_ids": "sequences of token ids that never occur, as 1,2;3",
    "suppress_tokens": "token ids that are never chosen, as 1,2",
    "num_return_sequences": "texts for each prompt",
    "max_time": "seconds after which no further token is generated",
    "use_cache": "keep keys and values between tokens: the same text, faster",
    "bos_token_id": "starts an empty prompt",
    "pad_token_id": "fills a batch up",
    "eos_token_id": "ends a text; several as 1,2",
    "forced_bos_token_id": "the first token after a prompt of one token",
    "forced_eos_token_id": "the last token where the length ends a text; several as 1,2",
    "remove_invalid_values": "replace NaN and infinite scores",
    "exponential_decay_length_penalty": "START,FACTOR: from START new tokens on the end of the "
    "text becomes likelier by FACTOR",
    "renormalize_logits": "make the final scores log probabilities",
    "seed": "seed of sampling",
}
FOR_CALLERS = (
    "output_scores",
    "prefix_allowed_tokens_fn",
    "logits_processor",
    "stopping_criteria",
)


def add_sampling_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add an option for each field of GenerationOptions.

    An option that is not given is None, so that the config decides; --help shows `defaults`, or
    the field's own default.
    """
    group = parser.add_argument_group("generation")
    for field in dataclasses.fields(GenerationOptions):
        if field.name not in HELP:
            continue
        default = defaults.get(field.name, field.default)
        text = f"{HELP[field.name]} (default: {_shown(default)})"
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(
                flag,
                action=_Switch,
                dest=field.name,
                help=text,
            )
        else:
            group.add_argument(
                flag, dest=field.name, metavar="N", type=_parser_of(str(field.type)), help=text
            )


def given_sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of generation that the command line named."""
    return {
        name: getattr(options, name) for name in HELP if getattr(options, name, None) is not None
    }


class _Switch(argparse.BooleanOptionalAction):
    """--name and --no-name, without the default that argparse would add to the help."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, default=None)
        self.help = help


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple | list):
        return ",".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


def _parser_of(annotation: str) -> Callable[[str], Any]:
    kinds = {kind.strip() for kind in annotation.split("|")}
    if "tuple[tuple[int, ...], ...]" in kinds:
        return _words
    if "tuple[int, ...]" in kinds:
        return _one_or_more_ids
    if "tuple[int, float]" in kinds:
        return _start_and_factor
    if any("Literal" in kind for kind in kinds):
        return _early_stopping
    return _whole_number if "int" in kinds else _number


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _one_or_more_ids(text: str) -> int | tuple[int, ...]:
    ids = tuple(_whole_number(part) for part in text.split(","))
    return ids[0] if len(ids) == 1 else ids


def _words(text: str) -> list[tuple[int, ...]]:
    return [tuple(_whole_number(part) for part in word.split(",")) for word in text.split(";")]


def _start_and_factor(text: str) -> tuple[int, float]:
    start, comma, factor = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not START,FACTOR, such as 20,1.05")
    return _whole_number(start), _number(factor)


def _early_stopping(text: str) -> bool | str:
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not true, false or never")
    return values[text]
