"""What processes settle with each other; tests/test_separate_disks.py has
several that really run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.errors import CheckpointError, UserError

import pytest

from flow_train import agreement


def fail(text: str) -> None:
    raise CheckpointError(text)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes this process the first of two; the other one says what is given."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)

    def says(value: Any) -> None:
        monkeypatch.setattr(distributed, "all_gather_json", lambda own: [own, value])

    return says


def test_a_process_alone_asks_nobody() -> None:
    assert agreement.together(lambda: 3) == agreement.from_rank(lambda: 3) == 3
    agreement.require_same({"--epochs": 3})
    with pytest.raises(CheckpointError, match=r"^no file$"):
        agreement.on_main(lambda: fail("no file"))


def test_problem_of_one_rank_is_said_to_be_its_own(other: Callable[[Any], None]) -> None:
    other(["the same", "no data here"])
    with pytest.raises(UserError, match="\n  - the same\n  - rank 1: no data here"):
        agreement.agree(["the same"])
    other(["no such file"])
    with pytest.raises(UserError, match=r"^rank 1: no such file"):
        agreement.together(lambda: 3)
    other([])
    with pytest.raises(UserError, match=r"^rank 0: no such file"):
        agreement.together(lambda: fail("no such file"))


def test_an_error_of_one_is_of_its_kind_on_all(
    other: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = CheckpointError("damaged")
    monkeypatch.setattr(
        agreement.check_point_v2, "_broadcast_py_object", lambda own, rank: sent if rank else own
    )
    assert agreement.from_rank(lambda: 3) == 3
    with pytest.raises(CheckpointError, match="damaged"):
        agreement.from_rank(lambda: 3, 1)


def test_what_differs_is_named(other: Callable[[Any], None]) -> None:
    other(["node-b", {"--lr": 0.1, "classes": list(range(100))}])
    with pytest.raises(UserError, match=r"classes: \[1, 2.*\.\.\. for process 0 on .* node-b;"):
        agreement.require_same({"--lr": 0.1, "classes": list(range(1, 100))})
    with pytest.raises(UserError, match=r"--lr: None for process 0 on .*, and 0.1 for process 1"):
        agreement.require_same({"classes": list(range(100))})


def test_of_what_a_machine_has_only_whether_it_is_given_must_be_the_same() -> None:
    config = {"data": [{"path": "/a", "size": 3}], "load_weight": "", "of": fail, "lr": (0.1, None)}
    assert agreement.plain_values(config, ("path", "load_weight")) == {
        "data.0.path given": True,
        "data.0.size": 3,
        "load_weight given": False,
        "lr.0": 0.1,
        "lr.1": None,
    }
