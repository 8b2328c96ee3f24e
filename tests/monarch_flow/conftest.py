"""Hundreds of tests compose the same few configurations, where hydra takes half a second."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    compose, known = hydra.compose, dict[tuple[str, ...], Any]()

    @functools.wraps(compose)
    def remembered(name: str, choices: Sequence[str], **options: Any) -> Any:
        path = str(GlobalHydra.instance().config_loader().get_search_path())
        key = (path, name, *choices)
        # Folders of one's own may change.
        if any("searchpath" in choice for choice in choices):
            return compose(name, choices, **options)
        if key not in known:
            known[key] = compose(name, choices, **options)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "compose", remembered)
        yield
