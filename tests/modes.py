"""In which order a run is handed on between the modes in which a trainer can run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
# ALL=1 in the environment: whatever takes long, in full.
ALL = "ALL" in os.environ


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
