"""Every parallel layout trains the Llama as one process does, over 20 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.libai_projects.magicprompt.test_gpt2_layouts import Runs
from tests.modes import some

TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(600)
LLAMA = {"model": "llama", "steps": 20}
TIED = {"config": {"tie_word_embeddings": True}}
FIRST = {"config": {"sequence_first": True}}
OVER_TIME = {"config": {"sequence_parallel": True}}
PACKED = {"documents": 3}


def cases(**given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name.replace("_", " "): {**LLAMA, **case} for name, case in given.items()}


ONE = cases(
    plain={"evaluate": True},
    tied=TIED,
    graph={"graph": True, "evaluate": True},
    accumulation={"accumulation": 4},
    graph_accumulation={"graph": True, "accumulation": 4, "checkpointing": True},
    time_first=FIRST,
    graph_time_first={"graph": True, **FIRST},
    packed=PACKED,
    graph_packed={"graph": True, **PACKED},
)
TWO = cases(
    data={"data": 2, "evaluate": True},
    tensor={"tensor": 2, "evaluate": True},
    pipeline={"pipeline": 2, "evaluate": True},
    pipeline_tied={"pipeline": 2, **TIED},
    tensor_over_time={"tensor": 2, "evaluate": True, **OVER_TIME},
    tensor_over_time_first={
        "tensor": 2,
        "config": {"sequence_parallel": True, "sequence_first": True},
    },
    data_time_first={"data": 2, **FIRST},
    tensor_packed={"tensor": 2, **PACKED},
    pipeline_packed={"pipeline": 2, **PACKED},
    graph_data={"graph": True, "data": 2, "evaluate": True},
    graph_tensor_over_time={"graph": True, "tensor": 2, "checkpointing": True, **OVER_TIME},
    graph_pipeline={"graph": True, "pipeline": 2, "accumulation": 2, "checkpointing": True},
    graph_zero_1={"graph": True, "data": 2, "zero": 1},
    graph_zero_3={"graph": True, "data": 2, "zero": 3},
)
TWO = some(
    TWO, "data", "tensor", "pipeline tied", "tensor over time", "graph zero 3", "graph pipeline"
)
FOUR = cases(
    data={"data": 4},
    data_tensor={"data": 2, "tensor": 2, **OVER_TIME},
    tensor_pipeline={"tensor": 2, "pipeline": 2},
    data_pipeline={"data": 2, "pipeline": 2},
    graph_data_tensor={"graph": True, "data": 2, "tensor": 2, **OVER_TIME},
    graph_tensor_pipeline={"graph": True, "tensor": 2, "pipeline": 2, "accumulation": 2},
)
FOUR = some(FOUR, "data tensor", "graph tensor pipeline")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("one"), 1, ONE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("four"), 4, FOUR)


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert len(found) >= 20
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=TOLERANCE)


def like(name: str) -> str:
    """The run of one process that a layout's equals."""
    return next((kind for kind in ("tied", "packed") if kind in name), "plain")


def test_one_process(one: Runs) -> None:
    # It learns, so that equal losses are not those of a model that stands still.
    assert one["plain"][20] < one["plain"][0] - 0.5
    for name in ONE:
        if name not in ("plain", "tied", "packed"):
            check(one[name], one[like(name)])
    # What is packed with a document does not change it, but it sees less.
    assert abs(one["packed"] - one["plain"][:20]).max() > 1e-3


@pytest.mark.parametrize("name", TWO)
def test_two_processes(one: Runs, two: Runs, name: str) -> None:
    check(two[name], one[like(name)])


@pytest.mark.parametrize("name", FOUR)
def test_four_processes(one: Runs, four: Runs, name: str) -> None:
    check(four[name], one["plain"])
