"""A command line from a model: each field is an option, of the field's type, range and default.

    class Options(Flags):
        epochs: Positive = flag(90, "N", "epochs to run", group=("training",))
        batch_size: Positive = flag(192, "N", names="-b --batch-size")
        "Images per step: a text that needs a line of its own stands below its field."

    parser = cli.Parser(prog="train.py")
    Options.add_to(parser)
    options = Options.parse(parser, sys.argv[1:])

What does not go together is refused by a validator of the model, in the words of the command line.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from oneflow_accel.errors import UserError, nearest

from pydantic import ConfigDict, Field, ValidationError

from flow_train.cli import Parser
from flow_train.config.schema import Group, described, phrase

F = TypeVar("F", bound="Flags")


def flag(
    default: Any,
    shown: str | tuple[str, ...] | None = None,
    text: str | None = None,
    *,
    names: str = "",
    bare: bool = False,
    group: tuple[str, ...] = (),
    how: Mapping[str, Any] = {},
    **more: Any,
) -> Any:
    """A field of `Flags`. It is on or off if it is a bool, one of several names if it is a Literal.

    Args:
        default: the value where the option is not given; `...`: it must be. It is not checked:
            where a validator puts another in place of None, the type is that one's.
        shown: what --help calls the value; several names: as many values.
        text: its help; else the field's docstring.
        names: the option's spellings, where these are not the field's name; one without a dash is
            an argument by position. Messages use the first long one.
        bare: without a value it is the first of its Literal.
        group: the title, and a text, of the group of --help that begins here.
        how: what else argparse takes, such as nargs.
        more: what else pydantic's Field takes, such as `exclude`, from `model_dump`.
    """
    extra: dict[str, Any] = {"names": names.split(), "shown": shown, "bare": bare, "group": group}
    extra["how"] = how
    return Field(default, description=text, json_schema_extra=extra, **more)


class Flags(Group):
    """A command line whose options are the fields, each made by `flag`."""

    model_config = ConfigDict(strict=False)
    # Between the words of an option's name.
    joint: ClassVar[str] = "-"
    # Whether what is on or off takes true or false, and means true without; else --no-NAME is off.
    switches: ClassVar[bool] = False
    # Whether arguments by position may stand between options.
    intermixed: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        described(cls)

    @classmethod
    def add_to(cls, parser: Parser) -> None:
        """Add the options to a parser, in the order and groups of the fields."""
        group: Any = parser
        for name, field in cls.model_fields.items():
            extra: Any = field.json_schema_extra
            names = extra["names"] or [f"--{name.replace('_', cls.joint)}"]
            group = parser.add_argument_group(*extra["group"]) if extra["group"] else group
            needed = field.is_required()
            more: dict[str, Any] = {"default": None if needed else field.default, **extra["how"]}
            more["help"] = field.description
            if field.annotation is bool and cls.switches:
                more |= {"nargs": "?", "const": "true", "metavar": "true|false"}
                more["default"] = str(field.default).lower()
            elif bool in (field.annotation, *typing.get_args(field.annotation)):
                on = "store_true" if field.default is False else argparse.BooleanOptionalAction
                more["action"] = "store_false" if names[0].startswith("--no") else on
            else:
                choices, shown = _choices(field.annotation), extra["shown"]
                more |= {"metavar": shown, "choices": choices or None}
                if isinstance(shown, tuple):
                    more["nargs"] = len(shown)
                if extra["bare"]:
                    more |= {"nargs": "?", "const": choices[0]}
            if names[0].startswith("-"):
                group.add_argument(*names, dest=name, required=needed, **more)
            else:
                group.add_argument(name, **({"nargs": None if needed else "?"} | more))

    @classmethod
    def parse(cls: type[F], parser: Parser, argv: Sequence[str]) -> F:
        """The options of a command line, for a parser that has them. UserError for one that is not
        there, and for values that the model refuses, by the options' names."""
        # Where a name has a value already, argparse leaves its default out.
        absent = argparse.Namespace(**dict.fromkeys(cls.model_fields))
        read = parser.parse_intermixed_args if cls.intermixed else parser.parse_args
        typed = vars(read(_with_values(parser, argv), absent))
        given = {name: text for name, text in typed.items() if text is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = {problem["loc"][:1]: problem for problem in error.errors()}
            texts = [cls._message(parser, given, problem) for problem in problems.values()]
            raise UserError("\n".join(texts)) from error

    @classmethod
    def _message(cls, parser: Parser, given: dict[str, Any], problem: Any) -> str:
        said = str(problem.get("ctx", {}).get("error", ""))
        if not problem["loc"]:
            return said
        name = problem["loc"][0]
        spelled = next(action.option_strings for action in parser._actions if action.dest == name)
        option = next((each for each in spelled if each.startswith("--")), name)
        if problem["type"] == "value_error":
            return f"{option}: {said}"
        text = given[name] if isinstance(given[name], str) else " ".join(given[name])
        wanted = phrase(cls.model_fields[name]).removesuffix(" or null")
        return f"{option} {text}: it must be {wanted}"


def _with_values(parser: Parser, argv: Sequence[str]) -> list[str]:
    """The command line with the value of each bare option: argparse would take an argument by
    position for it. A folder, or what is like none of the names, is not one."""
    words = list(argv)
    for number, word in enumerate(argv):
        after = "".join(argv[number + 1 : number + 2])
        for action in parser._actions:
            bare = action.nargs == "?" and action.choices
            if not bare or word not in action.option_strings:
                continue
            if Path(after).is_dir() or not nearest(after, action.choices or ()):
                words[number] = f"{word}={action.const}"
    return words


def _choices(kind: Any) -> tuple[Any, ...]:
    """The names of a Literal, which None may stand beside."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return inner
    return tuple(choice for each in inner for choice in _choices(each))
