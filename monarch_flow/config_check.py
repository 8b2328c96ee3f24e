"""A composed configuration against its schema: unknown keys, wrong types, values out of range."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from oneflow_accel.errors import UserError

from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flow_train.config.overrides import nearest_key
from monarch_flow.config_schema import Config

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a group of keys",
    type(None): "null",
    Any: "anything",
}
# The groups whose keys depend on the name in them: only what is set goes on to what they describe.
_OPEN_GROUPS = ("model", "optimizer", "scheduler")


def check(values: dict[str, Any], derived: Collection[str] = ()) -> dict[str, Any]:
    """`values` with the defaults of the schema filled in.

    Args:
        values: a whole configuration, resolved.
        derived: keys whose value was computed from others; what is wrong with them is not said
            where one of the others is wrong.

    Raises:
        UserError: names each key that is wrong, its value, and what is wanted.
    """
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        messages = _messages(error, values)
        causes = [text for key, text in messages.items() if key not in derived]
        raise UserError("\n".join(causes or messages.values())) from error
    checked = config.model_dump()
    for name in _OPEN_GROUPS:
        group = getattr(config, name)
        checked[name] = None if group is None else group.model_dump(exclude_unset=True)
    return checked


def check_combinations(values: Mapping[str, Any]) -> None:
    """Keys that say nothing, or the wrong thing, without others or beside them.

    Args:
        values: what `check` returned.

    Raises:
        UserError: names the keys and what to do.
    """
    name = values["name"]
    if Path(name).is_absolute() or not set(name.split("/")).isdisjoint({"", ".", ".."}):
        raise UserError(
            f"name={name}: the run's folder of that name is to be inside work_dir; name another "
            "place by work_dir=DIR or run_dir=DIR"
        )
    source = values["train"]["init_from"]
    for key in ("project", "reset_head"):
        if source[key] and source["path"] is None:
            raise UserError(
                f"train.init_from.{key}=true: of which weights? Give train.init_from.path=PATH"
            )
    evaluation = values["eval"]
    if values["mode"] != "eval":
        for key in ("results_file", "real_labels"):
            if evaluation[key]:
                raise UserError(
                    f"eval.{key}={evaluation[key]}: training does not use it; evaluate with "
                    "eval.ckpt=PATH, or leave it out"
                )
    elif values["resume"] is not None:
        raise UserError(
            f"resume={values['resume']}: {evaluation['ckpt']} is evaluated (eval.ckpt), and no run "
            "goes on; leave one of the two out"
        )
    trainer = values["trainer"]
    if trainer["max_epochs"] is not None and trainer["min_epochs"] > trainer["max_epochs"]:
        raise UserError(
            f"trainer.min_epochs={trainer['min_epochs']} is more than trainer.max_epochs="
            f"{trainer['max_epochs']}"
        )


def schema_fields(
    model: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the schema with its path, such as "trainer.max_epochs", groups too."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        inner = _group_of(field)
        if inner is not None:
            yield from schema_fields(inner, f"{prefix}{name}.")


def in_schema(key: str) -> bool:
    """Whether the schema names this key."""
    path = key.split(".")
    return _locate(path)[1] == len(path)


def is_free(key: str) -> bool:
    """Whether the schema leaves this key to what its group describes, such as a layer's options."""
    path = key.split(".")
    field, depth = _locate(path)
    return 0 < depth < len(path) and dict in _kinds(field)


def unknown_key(key: str, keys: Sequence[str] = ()) -> str:
    """What to say of a key that is not there.

    Args:
        key: with its path.
        keys: further ones that could be meant.
    """
    known = [name for name, _ in schema_fields()]
    near = nearest_key(key, [*known, *keys])
    hint = f"did you mean {near}?" if near else f"the top keys are {', '.join(Config.model_fields)}"
    return f"there is no key {key}; {hint}"


def wanted(key: str) -> str:
    """What a key's value has to be, in words."""
    field, _ = _locate(key.split("."))
    return _phrase(field.annotation, field.metadata) if field else "a key of the configuration"


def _messages(error: ValidationError, values: dict[str, Any]) -> dict[str, str]:
    """One line per key that is wrong, by key."""
    messages: dict[str, str] = {}
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            key = ".".join(path)
            messages[key] = unknown_key(key)
            continue
        field, depth = _locate(path)
        key = ".".join(path[:depth]) or ".".join(path)
        phrase = _phrase(field.annotation, field.metadata) if field else "something else"
        if problem["type"] == "missing":
            messages[key] = f"{key} is not set; it is to be {phrase}"
        else:
            value = OmegaConf.select(OmegaConf.create(values), key)
            messages[key] = f"{key}={_shown(value)}: it is to be {phrase}"
    return messages


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def _locate(path: Sequence[str]) -> tuple[FieldInfo | None, int]:
    """The innermost field on a path, and how many parts of the path lead to it."""
    model: type[BaseModel] | None = Config
    field = None
    for depth, part in enumerate(path):
        if model is None or part not in model.model_fields:
            return field, depth
        field = model.model_fields[part]
        model = _group_of(field)
    return field, len(path)


def _group_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in _kinds(field):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _kinds(field: FieldInfo | None) -> list[Any]:
    """The types that a field may have, without what qualifies them."""
    if field is None:
        return []
    found, waiting = [], [field.annotation]
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


def _phrase(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _phrase(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        # In the order they are written, null last, each phrase once (a whole number is a number).
        inner = [argument for argument in arguments if argument is not type(None)]
        if int in inner and float in inner:
            inner.remove(int)
        # Bounds of the whole are bounds of each.
        phrases = list(dict.fromkeys(_phrase(argument, metadata) for argument in inner))
        if type(None) in arguments:
            phrases.append("null")
        return " or ".join(phrases)
    if origin is typing.Literal:
        return _one_of([_shown(value).strip("'") for value in arguments])
    if origin is list:
        low, high = _bound(metadata, "min_length"), _bound(metadata, "max_length")
        count = f"{low} " if low == high and low else ""
        return f"a list of {count}values, each {_phrase(arguments[0])}"
    if origin is dict:
        return _WORDS[dict]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a group of keys ({', '.join(kind.model_fields)})"
    return " ".join(filter(None, [_WORDS.get(kind, str(kind)), _bounds(metadata)]))


def _one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


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
        if isinstance(item, FieldInfo):
            inner = _bound(item.metadata, name)
            if inner is not None:
                return inner
        elif getattr(item, name, None) is not None:
            return getattr(item, name)
    return None
