"""A program's schema: pydantic models that name every key with type, range and default, and the
messages about a configuration that does not fit them."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from oneflow_accel.errors import UserError, did_you_mean

from omegaconf import OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a group of keys",
    type(None): "null",
    Any: "anything",
}


G = TypeVar("G", bound=BaseModel)


class Group(BaseModel):
    """A mapping that has these keys and no others."""

    # Built when first used: a program reads few groups, and --help none.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )


def described(model: type[G]) -> type[G]:
    """Give each field that has none the text below it for its description. What pydantic has for it
    looks for the text in all modules that are loaded, 0.1 s of a program's start."""
    body: list[Any] = []
    # What is typed at a prompt is in no file.
    with suppress(OSError, TypeError):
        body = ast.parse(inspect.getsource(sys.modules[model.__module__])).body
    for name in model.__qualname__.replace(".<locals>", "").split("."):
        body = next((node.body for node in body if getattr(node, "name", None) == name), [])
    for pair in pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                field = model.model_fields.get(name)
                if field is not None and field.description is None:
                    field.description = inspect.cleandoc(text)
    return model


def _text(value: Any) -> Any:
    # YAML reads the name 2024 as a number.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_text)]


@dataclass(frozen=True)
class Wanted:
    """In the Annotated of a type that its own name and bounds describe badly: what it takes, in
    words, for messages."""

    words: str


class Schema:
    """What a configuration may say. Keys in `open_groups` depend on the name in the group: only
    what is set goes on to what they describe. Messages begin keys with `prefix`, such as
    "optimizer."."""

    def __init__(
        self, model: type[BaseModel], open_groups: Collection[str] = (), prefix: str = ""
    ) -> None:
        self.model = model
        self._open_groups = open_groups
        self._prefix = prefix

    def check(self, values: dict[str, Any], derived: Collection[str] = ()) -> dict[str, Any]:
        """`values`, a whole configuration, with the schema's defaults filled in. UserError names
        each key that is wrong, its value, and what is wanted; but not keys in `derived`, whose
        values are computed from others, where one of those others is wrong."""
        try:
            config = self.model.model_validate(values)
        except ValidationError as error:
            messages = self.messages(error, values)
            causes = [text for key, text in messages.items() if key not in derived]
            raise UserError("\n".join(causes or messages.values())) from error
        checked = config.model_dump()
        for name in self._open_groups:
            group = getattr(config, name)
            checked[name] = None if group is None else group.model_dump(exclude_unset=True)
        return checked

    def fields(
        self, model: type[BaseModel] | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, FieldInfo]]:
        """Every key with its path, such as "trainer.max_epochs", groups too."""
        for name, field in (model or self.model).model_fields.items():
            yield f"{prefix}{name}", field
            inner = _group_of(field)
            if inner is not None:
                yield from self.fields(inner, f"{prefix}{name}.")

    def __contains__(self, key: str) -> bool:
        path = key.split(".")
        return self._locate(path)[1] == len(path)

    def is_free(self, key: str) -> bool:
        """Whether a key is left to what its group describes, such as a layer's options."""
        path = key.split(".")
        field, depth = self._locate(path)
        return 0 < depth < len(path) and dict in _kinds(field)

    def unknown_key(self, key: str, keys: Sequence[str] = ()) -> str:
        """What to say of a key that is not there; `keys` are further ones that could be meant."""
        known = [*(name for name, _ in self.fields(prefix=self._prefix)), *keys]
        top = f"the top keys are {', '.join(self.model.model_fields)}"
        return f"there is no key {key}; {did_you_mean(key, known, top)}"

    def wanted(self, key: str) -> str:
        field, _ = self._locate(key.split("."))
        return phrase(field) if field else "a key of the configuration"

    def messages(self, error: ValidationError, values: dict[str, Any]) -> dict[str, str]:
        messages: dict[str, str] = {}
        for problem in error.errors():
            path = [str(part) for part in problem["loc"]]
            field, depth = self._locate(path)
            if problem["type"] == "extra_forbidden":
                depth = len(path)
            inside = ".".join(path[:depth]) or ".".join(path)
            key = f"{self._prefix}{inside}".removesuffix(".")
            wanted = phrase(field) if field else "something else"
            if problem["type"] == "extra_forbidden":
                messages[key] = self.unknown_key(key)
            elif problem["type"] == "missing":
                messages[key] = f"{key} is not set; it must be {wanted}"
            elif problem["type"] == "value_error":
                # A group that says itself what does not go together.
                messages[key] = f"{key}: {problem['ctx']['error']}"
            else:
                value = OmegaConf.select(OmegaConf.create(values), inside)
                messages[key] = f"{key}={shown(value)}: it must be {wanted}"
        return messages

    def _locate(self, path: Sequence[str]) -> tuple[FieldInfo | None, int]:
        """The innermost field on a path, and how many parts of the path lead to it."""
        model: type[BaseModel] | None = self.model
        field = None
        for depth, part in enumerate(path):
            if model is None or part not in model.model_fields:
                return field, depth
            field = model.model_fields[part]
            model = _group_of(field)
        return field, len(path)


def read(group: type[G], values: Mapping[str, Any] | None, where: str) -> G:
    """A group by itself, checked, with its defaults filled in; `where` is its key, for messages.
    UserError names each key that is wrong, its value, and what is wanted."""
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(values or {})), resolve=True)
    try:
        return group.model_validate(plain)
    except ValidationError as error:
        messages = Schema(group, prefix=f"{where}.").messages(error, plain)
        raise UserError("\n".join(messages.values())) from error


def shown(value: Any) -> str:
    """A value as one types it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _group_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in _kinds(field):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kinds(field: FieldInfo | None) -> list[Any]:
    """The types that a field may have, without what qualifies them."""
    found, waiting = [], [] if field is None else [field.annotation]
    while waiting:
        kind = waiting.pop()
        origin = typing.get_origin(kind)
        if origin is Annotated:
            waiting.append(typing.get_args(kind)[0])
        elif origin in (typing.Union, types.UnionType):
            waiting += typing.get_args(kind)
        else:
            found.append(origin or kind)
    return found


def phrase(field: FieldInfo) -> str:
    """What a field takes in words, such as "a whole number of at least 1 or null"."""
    return _phrase(field.annotation, field.metadata)


def _phrase(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    for item in metadata:
        if isinstance(item, Wanted):
            return item.words
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _phrase(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        # In the order they are written, null last, each phrase once (a whole number is a number).
        inner = [argument for argument in arguments if argument is not type(None)]
        if int in inner and float in inner:
            inner.remove(int)
        # Bounds of the whole are bounds of each of its types.
        phrases = list(dict.fromkeys(_phrase(argument, metadata) for argument in inner))
        return " or ".join(phrases + ["null"] * (type(None) in arguments))
    if origin is typing.Literal:
        *most, last = [shown(value).strip("'") for value in arguments]
        return f"{', '.join(most)} or {last}" if most else last
    if origin is list:
        low, high = _bound(metadata, "min_length"), _bound(metadata, "max_length")
        count = f"{low} " if low == high and low else ""
        return f"a list of {count}values, each {_phrase(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} values, each {_phrase(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a group of keys ({', '.join(kind.model_fields)})"
    name = _WORDS.get(origin or kind, str(kind))
    return " ".join(filter(None, [name, _bounds(metadata)]))


def _bounds(metadata: Sequence[Any]) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    found = {name: _bound(metadata, name) for name in words}
    if found["ge"] is not None and found["le"] is not None:
        return f"from {found['ge']} to {found['le']}"
    parts = [f"{word} {found[name]}" for name, word in words.items() if found[name] is not None]
    return " and ".join(parts)


def _bound(metadata: Sequence[Any], name: str) -> Any:
    """A constraint such as `ge`, which stands in the metadata itself or in a Field there."""
    for item in metadata:
        inner = _bound(item.metadata, name) if isinstance(item, FieldInfo) else None
        found = getattr(item, name, None) if inner is None else inner
        if found is not None:
            return found
    return None
