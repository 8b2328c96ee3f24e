"""What is tested always, and what takes long and only with ALL=1 in the environment; in which order
a run is handed on between the modes in which a trainer can run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
# ALL=1 in the environment: whatever takes long, in full.
ALL = "ALL" in os.environ
# What others show as well, or what only changes with what is installed.
only_all = pytest.mark.skipif(not ALL, reason="others show it too: ALL=1 runs it")


def some(cases: Mapping[str, T], *names: str) -> dict[str, T]:
    """The cases of these names; with ALL=1 all of them."""
    assert cases.keys() >= set(names)
    return {name: case for name, case in cases.items() if ALL or name in names}


def handed_on(modes: Sequence[T]) -> list[T]:
    """Each mode once and the first again; with ALL=1 each goes on from every other once."""
    if not ALL:
        return [*modes, modes[0]]
    # Hierholzer's walk over all ordered pairs.
    left = {i: [j for j in range(len(modes)) if j != i] for i in range(len(modes))}
    path, walk = [0], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            walk.append(path.pop())
    return [modes[number] for number in reversed(walk)]
