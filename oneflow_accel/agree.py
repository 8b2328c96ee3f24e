"""What the processes of a job settle before they go on. Every process makes each of these calls; an
error of one is an error of all, so that none is left waiting for another."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from oneflow_accel import distributed
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow.framework import check_point_v2

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], *, rank: int = 0) -> T:
    """What `action` returns on one process (anything pickle can say), on all of them; they get its
    UserError, too."""
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


def everywhere(action: Callable[[], T]) -> T:
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


def whole(tensor: flow.Tensor, to: int | None = 0) -> flow.Tensor:
    """The whole value of a global tensor, detached and local: on the host of process `to`, without
    elements on the others; or, where that is None, on every process, on the tensor's device, or on
    the host where it lies on some processes only. A local tensor is each process's own."""
    # A device may have no room for the whole of what it keeps a part of.
    value = tensor.detach() if to is None else tensor.detach().cpu()
    if not value.is_global:
        return value
    if to is None and value.placement.ranks.size < distributed.world_size():
        value = whole(value)
        if not distributed.is_main():
            value = flow.zeros(tuple(tensor.shape), dtype=tensor.dtype)
        distributed.broadcast([value])
        return value
    value = value.to_global(sbp=[flow.sbp.broadcast] * len(value.sbp))
    if to is not None:
        value = value.to_global(placement=flow.placement("cpu", [to]), sbp=flow.sbp.broadcast)
    return value.to_local()


def agree(problems: list[str]) -> None:
    """Raise the problems of all ranks on each of them; one that only some ranks have says which."""
    found: dict[str, list[int]] = {}
    of_all = distributed.all_gather_json(problems)
    for rank, texts in enumerate(of_all):
        for text in texts:
            found.setdefault(text, []).append(rank)
    if not found:
        return
    lines = [
        text if len(ranks) == len(of_all) else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in found.items()
    ]
    raise UserError(lines[0] if len(lines) == 1 else "\n  - ".join(["", *lines]))


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
    of_all = distributed.all_gather_json([socket.gethostname(), dict(found)])
    host, first = of_all[0]
    for rank, (theirs, other) in enumerate(of_all):
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
