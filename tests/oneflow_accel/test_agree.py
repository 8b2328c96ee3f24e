"""What processes settle with each other; tests/test_separate_disks.py has several that really
run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oneflow_accel import agree, distributed
from oneflow_accel.errors import CheckpointError, UserError

import numpy as np
import oneflow as flow
import pytest

from tests.launch import run_distributed


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
    assert agree.everywhere(lambda: 3) == agree.on_rank_0(lambda: 3) == 3
    agree.require_same({"--epochs": 3})
    with pytest.raises(CheckpointError, match=r"^no file$"):
        agree.on_rank_0(lambda: fail("no file"))


def test_problem_of_one_rank_is_said_to_be_its_own(other: Callable[[Any], None]) -> None:
    other(["the same", "no data here"])
    with pytest.raises(UserError, match="\n  - the same\n  - rank 1: no data here"):
        agree.agree(["the same"])
    other(["no such file"])
    with pytest.raises(UserError, match=r"^rank 1: no such file"):
        agree.everywhere(lambda: 3)
    other([])
    with pytest.raises(UserError, match=r"^rank 0: no such file"):
        agree.everywhere(lambda: fail("no such file"))


def test_an_error_of_one_is_of_its_kind_on_all(
    other: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = CheckpointError("damaged")
    monkeypatch.setattr(
        agree.check_point_v2, "_broadcast_py_object", lambda own, rank: sent if rank else own
    )
    assert agree.on_rank_0(lambda: 3) == 3
    with pytest.raises(CheckpointError, match="damaged"):
        agree.on_rank_0(lambda: 3, rank=1)


def test_what_differs_is_named(other: Callable[[Any], None]) -> None:
    other(["node-b", {"--lr": 0.1, "classes": list(range(100))}])
    with pytest.raises(UserError, match=r"classes: \[1, 2.*\.\.\. for process 0 on .* node-b;"):
        agree.require_same({"--lr": 0.1, "classes": list(range(1, 100))})
    with pytest.raises(UserError, match=r"--lr: None for process 0 on .*, and 0.1 for process 1"):
        agree.require_same({"classes": list(range(100))})


def test_of_what_a_machine_has_only_whether_it_is_given_must_be_the_same() -> None:
    config = {"data": [{"path": "/a", "size": 3}], "load_weight": "", "of": fail, "lr": (0.1, None)}
    assert agree.plain_values(config, ("path", "load_weight")) == {
        "data.0.path given": True,
        "data.0.size": 3,
        "load_weight given": False,
        "lr.0": 0.1,
        "lr.1": None,
    }


WHOLE = """
import numpy as np, oneflow as flow
from oneflow_accel import agree, distributed
B, S = flow.sbp.broadcast, flow.sbp.split
array, rank = np.arange(15, dtype=np.float32).reshape(5, 3), distributed.rank()
for ranks, sbp in (
    ([0, 1], [S(0)]), ([0, 1], [S(1)]), ([1], [B]), ([[0, 1]], [B, S(0)]), ([[0], [1]], [S(0), B]),
):
    placement = flow.placement("cpu", ranks)
    tensor = flow.tensor(array).to_global(placement=placement, sbp=[B] * len(sbp))
    tensor = tensor.to_global(sbp=sbp).requires_grad_()
    for to in (0, 1, None):
        value = agree.whole(tensor, to=to)
        has = to is None or rank == to
        assert value.is_local and not value.requires_grad, (ranks, sbp, to)
        assert np.array_equal(value.numpy(), array) if has else value.numel() == 0, (ranks, sbp, to)
print("whole")
"""


def test_a_tensor_is_whole_where_it_is_wanted(tmp_path: Path) -> None:
    """Cut, on another process only, and in layouts of two axes."""
    program = tmp_path / "program.py"
    program.write_text(WHOLE)
    result = run_distributed([program], 2, timeout=90)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("whole") == 2


def test_a_local_tensor_is_whole_as_it_is() -> None:
    tensor = flow.ones(2, requires_grad=True)
    for to in (0, None):
        value = agree.whole(tensor, to=to)
        assert not value.requires_grad
        assert np.array_equal(value.numpy(), [1, 1])
