"""The command line of a generation pipeline, and how the processes of a job are laid out for it:
data x tensor x pipeline parallel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import CacheDtype, WeightsDtype

from pydantic import BeforeValidator, Field, create_model, model_validator

from flow_train.cli import Parser
from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Above0, Count, Positive
from libai_projects.command.checks import Layout
from libai_projects.generation import GenerationOptions
from libai_projects.inference.requests import Limits
from libai_projects.inference.text_pipeline import DEFAULT_OPTIONS


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
Mode = Literal["auto", "huggingface", "libai", "random"]
MODES = get_args(Mode)

# Texts with commas between.
_APART = BeforeValidator(lambda text: text.split(",") if isinstance(text, str) else text)


class Command(Flags):
    """What has nothing to do with sampling; `Options` has that too."""

    prompt: list[str] | None = flag(
        None, "TEXT", how={"action": "append"}, group=("what to continue",)
    )
    "a prompt; several with one --prompt for each (default: three short examples)"
    interactive: bool = flag(False, text="ask for prompts, one per line")
    jsonl: bool = flag(False)
    """read {"prompt": ..., "id": ..., and options of generation} from each line of the standard
    input, write one JSON object for each to the standard output; a bad line gets an object with
    `error`, and the exit code is then 1"""
    serve: bool = flag(False, text="a web page and OpenAI's API, for many at once")
    stream: bool = flag(False, text="write text as it comes")
    batch_size: Positive | None = flag(None, "N")
    "prompts to continue at once (default: all of --prompt)"

    model: str | None = flag(None, "PATH", group=("model",))
    """a Hugging Face directory, a LiBai checkpoint or the output folder of a training (default: the
    config's, which is $MAGICPROMPT_MODEL, for a Llama $LLAMA_MODEL, or where training writes)"""
    mode: Mode = flag("auto")
    "what --model is; random: no model, random weights (default: auto, by looking at it)"
    config_file: str | None = flag(None, "FILE", "config (default: this project's)")
    vocab_file: str | None = flag(None, "FILE")
    """vocab.json of the tokenizer (default: $MAGICPROMPT_VOCAB, else ./magicprompt/vocab.json, else
    the one beside a Hugging Face model)"""
    merges_file: str | None = flag(None, "FILE")
    "merges.txt of the tokenizer (default: $MAGICPROMPT_MERGES, else likewise)"
    tokenizer: str | None = flag(None, "PATH")
    """tokenizer.json or tokenizer.model, or the folder it is in (default: for a Llama
    $LLAMA_TOKENIZER, else the one beside a Hugging Face model)"""
    device: str | None = flag(None, "NAME")
    "device (default: $ONEFLOW_ACCEL_DEVICE, else the best)"
    weights_dtype: WeightsDtype = flag("float32")
    """what the weights of linear layers are rounded to for generation: fewer bytes to read for each
    token. int8 has a scale for each output, and rounds what is multiplied too"""
    cache_dtype: CacheDtype | None = flag(None)
    "likewise keys and values (default: float32 beside float32 weights, else bfloat16)"

    tensor_parallel: Positive | None = flag(None, "N", group=("several processes",))
    "processes that share each layer (default: what the others leave)"
    pipeline_parallel: Positive | None = flag(None, "N")
    "stages, each with some of the layers (default: what the others leave)"
    data_parallel: Positive | None = flag(None, "N")
    "replicas; all of them do the same work (default: what the others leave)"
    pipeline_stage_id: Annotated[list[Count], _APART] | None = flag(None, "ID,...")
    """the stage of each layer, such as 0,0,0,1 for four layers on two stages (default: the same
    number on each)"""
    pipeline_num_layers: Positive | None = flag(None, "N")
    "layers of the model, which it knows itself"

    host: str = flag("127.0.0.1", group=("--serve",))
    "address to listen at; 0.0.0.0 lets other machines in"
    port: Annotated[int, Field(ge=0, le=65535)] = flag(8000, text="port; 0: any free one")
    allowed_hosts: Annotated[list[str], _APART] = flag([], "NAME,...")
    """names, none by default, that the server is reached by besides localhost and --host, such as
    prompts.example.com or *.example.com; * for any. Requests under another name, and from pages of
    another, are refused: they may come from a web site that points its name here (at --host 0.0.0.0
    every address and this machine's own name are allowed)"""
    allowed_origins: Annotated[list[str], _APART] = flag([], "ORIGIN,...")
    """pages of other servers, none by default, that may ask this one (CORS), such as
    https://prompts.example.com; * for any. With $MAGICPROMPT_API_KEY set, whoever asks for texts
    has to send Authorization: Bearer KEY"""
    overrides: list[str] = flag(
        [], "KEY=VALUE", argparse.SUPPRESS, names="overrides", how={"nargs": "*"}
    )

    @model_validator(mode="after")
    def _check(self) -> Command:
        # A number alone is LiBai's count of devices.
        self.overrides = [text for text in self.overrides if not text.isdigit()]
        for text in self.overrides:
            if "=" not in text:
                raise ValueError(
                    f"{text!r} is not understood: a prompt is given as --prompt {text!r}"
                )
        ways = [way for way in ("prompt", "interactive", "jsonl", "serve") if getattr(self, way)]
        if len(ways) > 1:
            raise ValueError(f"--{ways[1]}: not allowed with --{ways[0]}")
        if self.mode == "random" and self.model is not None:
            raise ValueError("--mode random needs no --model: leave one of the two out")
        if self.batch_size is not None and ways not in ([], ["prompt"]):
            raise ValueError("--batch-size is for --prompt only")
        for name in given_sampling_options(self) if self.serve else ():
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is set by each request to --serve: leave it out")
        return self


def given_sampling_options(options: Command) -> dict[str, Any]:
    """The options of generation that the command line named."""
    given = {name: getattr(options, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def limits_of(options: Command) -> Limits:
    return Limits(**{name: getattr(options, f"limit_{name}") for name in Limits.model_fields})


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


def _texts(text: str) -> Any:
    """A JSON list of texts, or one text as it is."""
    if text.startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return text


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "none" if default is None else str(default)


def _sampling() -> dict[str, Any]:
    """A field for each of SAMPLING; None where it is not given, so that the config decides."""
    found: dict[str, Any] = {}
    for name in SAMPLING:
        field = _FIELDS[name]
        default = _shown(DEFAULT_OPTIONS.get(name, field.default))
        text = f"{field.description} (default: {default})"
        group = () if found else ("generation",)
        read = {"bad_words_ids": _lists, "stop_strings": _texts}.get(name, _one_or_several)
        kind = bool | None if field.annotation is bool else Annotated[Any, BeforeValidator(read)]
        found[name] = kind, flag(None, "N", text, group=group)
    return found


Options = create_model(
    "Options",
    __base__=Command,
    **{
        f"limit_{name}": (Above0, flag(field.default, "S", field.description))
        if field.annotation is float
        else (Positive, flag(field.default, "N", field.description))
        for name, field in Limits.model_fields.items()
    },
    **_sampling(),
)


class _AnyOrder(Parser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


def build_parser() -> Parser:
    parser = _AnyOrder(
        prog="pipeline.py",
        description="Continue prompts with a language model, on one process or on several.",
        usage="%(prog)s [options] [KEY=VALUE ...]   (in any order)",
        epilog="KEY=VALUE changes a key of the config, +KEY=VALUE adds one. A single number, as "
        "in `%(prog)s 1`, is ignored. On several processes: python3 -m oneflow.distributed.launch "
        "--nproc_per_node N %(prog)s ...; with 4 and nothing said it is tensor 2 x pipeline 2.",
        allow_abbrev=False,
    )
    Options.add_to(parser)
    return parser


def parse_options(argv: Sequence[str]) -> Command:
    """Read the command line; `overrides` holds the KEY=VALUE texts.

    Raises:
        UserError: an option that does not exist (names the nearest one) or is used wrongly.
        SystemExit: after --help.
    """
    return Options.parse(build_parser(), argv)
