"""What the processes of a job settle before they go on. Every process makes each of these calls; an
error of one is an error of all, so that none is left waiting for another."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

from oneflow.framework import check_point_v2

T = TypeVar("T")


def agree(problems: list[str]) -> None:
    """Raise the problems of all ranks on each of them; one that only some ranks have says which."""
    found: dict[str, list[int]] = {}
    everywhere = distributed.all_gather_json(problems)
    for rank, texts in enumerate(everywhere):
        for text in texts:
            found.setdefault(text, []).append(rank)
    if not found:
        return
    lines = [
        text if len(ranks) == len(everywhere) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in found.items()
    ]
    raise UserError(lines[0] if len(lines) == 1 else "\n  - ".join(["", *lines]))


def together(action: Callable[[], T]) -> T:
    """What `action` returns, run on every process; a UserError on any is raised on all."""
    if distributed.world_size() == 1:
        return action()
    result, problems = cast(T, None), []
    try:
        result = action()
    except UserError as error:
        problems.append(str(error))
    agree(problems)
    return result


def from_rank(action: Callable[[], T], rank: int = 0) -> T:
    """What `action` returns on one process, on all of them; they get its UserError, too."""
    if distributed.world_size() == 1:
        return action()
    answer: Any = None
    if distributed.rank() == rank:
        try:
            answer = action()
        except UserError as error:
            answer = error
    # oneflow unpickles it, which is safe: only this job's own processes send here.
    answer = check_point_v2._broadcast_py_object(answer, rank)
    if isinstance(answer, UserError):
        raise answer
    return cast(T, answer)


def on_main(action: Callable[[], T]) -> T | None:
    """What `action` returns on the main process, None on the others, which get its UserError."""
    result: T | None = None

    def keep() -> None:
        nonlocal result
        result = action()

    from_rank(keep)
    return result


def plain_values(value: Any, of_a_machine: tuple[str, ...], key: str = "") -> dict[str, Any]:
    """The plain values in nested dicts and lists, by keys such as a.b.0; of those that may differ
    between machines, whose key ends with a word of `of_a_machine`, whether there is one."""
    if key.endswith(of_a_machine):
        return {f"{key} given": value not in (None, "")}
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        parts = (plain_values(v, of_a_machine, f"{key}.{k}" if key else str(k)) for k, v in pairs)
        return {name: each for part in parts for name, each in part.items()}
    return {key: value} if value is None or isinstance(value, str | int | float) else {}


def require_same(found: Mapping[str, Any]) -> None:
    """UserError, which names what differs and where, unless every process has found the same as the
    first; values are JSON's, by what a user calls them."""
    everywhere = distributed.all_gather_json([socket.gethostname(), dict(found)])
    host, first = everywhere[0]
    for rank, (theirs, other) in enumerate(everywhere):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name}: {_short(first.get(name))} for process 0 on {host}, and "
                    f"{_short(other.get(name))} for process {rank} on {theirs}; all processes of a "
                    "job need the same: give every machine the same files and the same command"
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
