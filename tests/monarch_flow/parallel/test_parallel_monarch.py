"""Monarch layers split over 2 and 4 processes against one process, and what they exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oneflow_accel
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from monarch_flow.layers import MonarchLinear
from monarch_flow.parallel import (
    SPLIT,
    ParallelMonarchLinear,
    check_blocks,
)
from tests.launch import run_distributed

WORKER = Path(__file__).parent / "parallel_worker.py"
# Float32, and sums in another order.
RELATIVE = 1e-5
# A launch that hangs is tried once more.
pytestmark = pytest.mark.timeout(400)

TWO = ["gradients", "traffic", "state", "refused"]
FOUR = ["gradients, 2 x 2", "traffic"]


def _run(folder: Path, processes: int, checks: list[str]) -> dict[str, Any]:
    path = folder / "checks.json"
    path.write_text(json.dumps(checks))
    environment = {"ONEFLOW_ACCEL_THREADS": "1"}
    result = run_distributed([WORKER, path], processes, timeout=180, env=environment, cwd=folder)
    assert result.returncode == 0, result.stdout[-3000:]
    found: dict[str, Any] = json.loads(path.with_suffix(".out").read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("four"), 4, FOUR)


def test_outputs_and_gradients_are_one_processs(two: dict[str, Any], four: dict[str, Any]) -> None:
    """Training, and under nn.Graph: tests/libai_projects/magicprompt/test_gpt2_monarch.py."""
    for found in (two["gradients"], four["gradients, 2 x 2"]):
        assert isinstance(found, dict), found
        # Three sizes, three layouts of the input, two of the output.
        assert len(found) == 18
        assert max(found.values()) < RELATIVE, found


def test_numbers_that_ranks_receive(two: dict[str, Any], four: dict[str, Any]) -> None:
    """768 -> 3072, 4 blocks, 2 ranks: each gets half of its half of 768 slots and 3072 outputs."""
    assert two["traffic"] == [1920, 1152, 1920, 64, 94, 32]
    assert four["traffic"] == [2880, 2880, 2880, 168, 258, 96]


def test_the_state_dict_is_monarch_linears(two: dict[str, Any]) -> None:
    found = two["state"]
    assert found["shapes"] == {"bias": [46], "blkdiag1": [4, 8, 8], "blkdiag2": [4, 12, 8]}
    assert found["same"]
    # Each of two ranks holds half of the blocks.
    assert found["held"] == 0.5
    assert found["matrix"] < 1e-6


def test_blocks_that_do_not_divide_are_refused(two: dict[str, Any]) -> None:
    assert "nblocks=3 cannot be split over a tensor-parallel world size of 2" in two["refused"]
    with pytest.raises(UserError, match=r"nblocks=6 .* world size of 4.* such as 8, or 1, 2, 3, 6"):
        check_blocks(6, 4)


def test_one_process_with_any_shape_of_input() -> None:
    placement = oneflow_accel.select_device().placement()
    flow.manual_seed(0)
    layer = MonarchLinear(10, 7)
    split = ParallelMonarchLinear(layer, placement, 0, SPLIT)
    repeated = ParallelMonarchLinear(layer, placement, None)
    for shape in ((10,), (3, 10), (2, 3, 10)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        wanted = layer(flow.tensor(x)).numpy()
        given = flow.tensor(x, placement=placement, sbp=flow.sbp.broadcast)
        for each in (split, repeated):
            np.testing.assert_allclose(each(given).numpy(), wanted, rtol=1e-5, atol=1e-6)
    assert "output=split" in repr(split)
    with pytest.raises(UserError, match="output is 'halves'"):
        ParallelMonarchLinear(layer, placement, 0, "halves")
