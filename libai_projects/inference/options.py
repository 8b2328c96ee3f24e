"""The command line of a generation pipeline, and how the processes of a job are laid out for it:
data x tensor x pipeline parallel.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from oneflow_accel.errors import UserError

from flow_train.cli import Parser, at_least
from libai_projects.engine.checks import Layout
from libai_projects.generation import GenerationOptions
from libai_projects.inference.requests import Limits


def check_stages(stages: Any) -> list[int] | None:
    """The stage of each layer, or None; a UserError unless whole numbers rise from 0 by ones."""
    if stages is None:
        return None
    several = isinstance(stages, Sequence) and not isinstance(stages, str)
    whole = several and all(type(stage) is int for stage in stages)
    if not whole or sorted(set(stages)) != list(range(len(set(stages)))) or not stages:
        raise UserError(
            f"pipeline_stage_id {stages!r:.80}: expected the stage of each layer, from 0 on, such "
            "as 0,0,0,1 for four layers on two stages"
        )
    return list(stages)


def choose_layout(
    processes: int,
    *,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> Layout:
    """Fill in the sizes that were not named so that all `processes` are used, or raise UserError.

    Tensor parallelism takes two processes where it can, the pipeline the rest. Data parallelism is
    used only when it or both others are named: a single prompt gains nothing from it.
    """
    named = {"data": data, "tensor": tensor, "pipeline": pipeline}
    for axis, size in named.items():
        if size is not None and size < 1:
            raise UserError(f"--{axis}-parallel {size}: must be at least 1")
    product = (data or 1) * (tensor or 1) * (pipeline or 1)
    rest, remainder = divmod(processes, product)
    if remainder or rest == 0 or (rest > 1 and None not in named.values()):
        sizes = " x ".join(f"{axis} {size}" for axis, size in named.items() if size is not None)
        count = "1 process does" if processes == 1 else f"{processes} processes do"
        raise UserError(
            f"{count} not fit the layout {sizes}: launch with "
            f"--nproc_per_node {product}, or change the sizes (--data-parallel, "
            "--tensor-parallel, --pipeline-parallel)"
        )
    if tensor is None and pipeline is None:
        tensor = 2 if rest % 2 == 0 else 1
        pipeline = rest // tensor
    elif tensor is None:
        tensor = rest
    elif pipeline is None:
        pipeline = rest
    elif data is None:
        data = rest
    return Layout(data or 1, tensor or 1, pipeline or 1)


_FIELDS = GenerationOptions.model_fields
SAMPLING = tuple(name for name, field in _FIELDS.items() if field.description)
"""The options of generation that have one of the command line."""
FOR_CALLERS = tuple(name for name in _FIELDS if name not in SAMPLING)
MODES = ("auto", "huggingface", "libai", "random")


def build_parser(program: str, generation: Mapping[str, Any], config_file: str) -> Parser:
    """The parser; --help shows `generation`, the config's own options."""
    parser = Parser(
        prog=program,
        description="Continue prompts with a language model, on one process or on several.",
        usage="%(prog)s [options] [KEY=VALUE ...]   (in any order)",
        epilog="KEY=VALUE changes a key of the config, +KEY=VALUE adds one. A single number, as "
        "in `%(prog)s 1`, is ignored. On several processes: python3 -m oneflow.distributed.launch "
        "--nproc_per_node N %(prog)s ...; with 4 and nothing said it is tensor 2 x pipeline 2.",
        allow_abbrev=False,
    )
    _add_input(parser)
    _add_model(parser, config_file)
    _add_layout(parser)
    _add_sampling(parser, generation)
    _add_server(parser)
    parser.add_argument("rest", nargs="*", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to continue")
    way = group.add_mutually_exclusive_group()
    way.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="a prompt; several with one --prompt for each (default: three short examples)",
    )
    way.add_argument("--interactive", action="store_true", help="ask for prompts, one per line")
    way.add_argument(
        "--jsonl",
        action="store_true",
        help='read {"prompt": ..., "id": ..., and options of generation} from each line of the '
        "standard input, write one JSON object for each to the standard output; a bad line gets "
        "an object with `error`, and the exit code is then 1",
    )
    way.add_argument("--serve", action="store_true", help="a web page and a JSON API")
    group.add_argument("--stream", action="store_true", help="write text as it comes")
    group.add_argument(
        "--batch-size",
        metavar="N",
        type=at_least(1),
        help="prompts to continue at once (default: all of --prompt)",
    )


def _add_model(parser: argparse.ArgumentParser, config_file: str) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face directory, a LiBai checkpoint or the output folder of a training "
        "(default: the config's, which is $MAGICPROMPT_MODEL, for a Llama $LLAMA_MODEL, or where "
        "training writes)",
    )
    group.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="what --model is; random: no model, random weights (default: auto, by looking at it)",
    )
    group.add_argument(
        "--config-file",
        metavar="FILE",
        default=config_file,
        help="config (default: this project's)",
    )
    group.add_argument(
        "--vocab-file",
        metavar="FILE",
        help="vocab.json of the tokenizer (default: $MAGICPROMPT_VOCAB, else "
        "./magicprompt/vocab.json, else the one beside a Hugging Face model)",
    )
    group.add_argument(
        "--merges-file",
        metavar="FILE",
        help="merges.txt of the tokenizer (default: $MAGICPROMPT_MERGES, else likewise)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a Llama's tokenizer.json or tokenizer.model, or the folder it is in (default: "
        "$LLAMA_TOKENIZER, else the one beside a Hugging Face model)",
    )
    group.add_argument(
        "--device", metavar="NAME", help="device (default: $ONEFLOW_ACCEL_DEVICE, else the best)"
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes")
    for axis, what in {
        "tensor": "processes that share each layer",
        "pipeline": "stages, each with some of the layers",
        "data": "replicas; all of them do the same work",
    }.items():
        group.add_argument(
            f"--{axis}-parallel",
            metavar="N",
            type=at_least(1),
            help=f"{what} (default: what the others leave)",
        )
    group.add_argument(
        "--pipeline-stage-id",
        metavar="ID,...",
        type=lambda text: [at_least(0)(part) for part in text.split(",")],
        help="the stage of each layer, such as 0,0,0,1 for four layers on two stages (default: the "
        "same number on each)",
    )
    group.add_argument(
        "--pipeline-num-layers",
        metavar="N",
        type=at_least(1),
        help="layers of the model, which it knows itself",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--serve")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; 0.0.0.0 lets other machines in (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=_port, default=8000, help="port; 0: any free one (default: %(default)s)"
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="NAME,...",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="names that the server is reached by besides localhost and --host, such as "
        "prompts.example.com or *.example.com; * for any. Requests under another name, and from "
        "pages of another, are refused: they may come from a web site that points its name here "
        "(at --host 0.0.0.0 every address and this machine's own name are allowed)",
    )
    for name, field in Limits.model_fields.items():
        in_seconds = field.annotation is float
        group.add_argument(
            "--limit-" + name.replace("_", "-"),
            metavar="S" if in_seconds else "N",
            type=_seconds if in_seconds else at_least(1),
            default=field.default,
            help=f"{field.description} (default: %(default)s)",
        )


def _add_sampling(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """An option for each of SAMPLING; None where it is not given, so that the config decides."""
    group = parser.add_argument_group("generation")
    for name in SAMPLING:
        field = _FIELDS[name]
        default = defaults.get(name, field.default)
        flag = "--" + name.replace("_", "-")
        arguments = {"dest": name, "help": f"{field.description} (default: {_shown(default)})"}
        if field.annotation is bool:
            group.add_argument(flag, action=_Switch, **arguments)
        else:
            read = _lists if name == "bad_words_ids" else _one_or_several
            group.add_argument(flag, metavar="N", type=read, **arguments)


def given_sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of generation that the command line named."""
    given = {name: getattr(options, name, None) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


class _Switch(argparse.BooleanOptionalAction):
    """--name and --no-name, without the default that argparse would add to the help."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, default=None)
        self.help = help


def _lists(text: str) -> list[tuple[Any, ...]]:
    return [tuple(map(_value, each.split(","))) for each in text.split(";")]


def _one_or_several(text: str) -> Any:
    values = tuple(map(_value, text.split(",")))
    return values[0] if len(values) == 1 else values


def _value(text: str) -> Any:
    """A number, true or false, else the text; what an option does not take, GenerationOptions
    refuses."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text, text)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple | list):
        return ",".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


def limits_of(options: argparse.Namespace) -> Limits:
    return Limits(**{name: getattr(options, f"limit_{name}") for name in Limits.model_fields})


def parse_options(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; `overrides` holds the KEY=VALUE texts.

    Raises:
        UserError: an option that does not exist (names the nearest one) or is used wrongly.
        SystemExit: after --help.
    """
    options = parser.parse_intermixed_args(argv)
    options.overrides = [text for text in options.rest if not text.isdigit()]
    for text in options.overrides:
        if "=" not in text:
            raise UserError(f"{text!r} is not understood: a prompt is given as --prompt {text!r}")
    if options.mode == "random" and options.model is not None:
        raise UserError("--mode random needs no --model: leave one of the two out")
    if options.batch_size is not None and (options.serve or options.interactive or options.jsonl):
        raise UserError("--batch-size is for --prompt only")
    given = given_sampling_options(options)
    if options.serve and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UserError(f"{flag} is set by each request to --serve: leave it out")
    return options


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
