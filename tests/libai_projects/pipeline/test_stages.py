"""Pipeline stages of different sizes generate what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

import pytest
from launch import REPOSITORY, run_distributed

from libai_projects.inference.options import check_stages, parse_options

HERE = Path(__file__).parent


def run(processes: int, cases: list[dict[str, Any]]) -> list[Any]:
    done = run_distributed(
        [HERE / "stages_worker.py", json.dumps(cases)],
        processes,
        env={"PYTHONPATH": f"{REPOSITORY}:{HERE}", "ONEFLOW_ACCEL_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith('["found"')]
    assert len(lines) == len(cases), done.stdout
    return [json.loads(line)[1] for line in lines]


@pytest.mark.release
def test_stages_of_different_sizes_give_the_tokens_of_one_process() -> None:
    # What upstream's callers say; one process holds all stages.
    four_and_one = {"pipeline_stage_id": [0, 0, 0, 0, 1], "pipeline_num_layers": 5}
    ((layers, expected),) = run(1, [four_and_one])
    assert layers == 5
    assert len({text["generated_text"] for text in expected[2]}) == 3
    two = run(
        2,
        [
            {**four_and_one, "tensor_parallel": 1, "pipeline_parallel": 2},
            # The number of stages follows from them.
            {"pipeline_stage_id": [0, 1, 1, 1, 1]},
            {"overrides": ["train.dist.custom_pipeline_stage_id=[0,0,0,1,1]"]},
            {"pipeline_stage_id": [0, 0, 0, 0, 1], "pipeline_num_layers": 12},
            {"pipeline_stage_id": [0, 0, 1]},
        ],
    )
    assert two[:3] == [[4, expected], [1, expected], [3, expected]]
    assert "5 entries for 12 layers" in two[3]
    assert "each of the 5 layers, there are 3 entries" in two[4]
    three = run(3, [{"pipeline_stage_id": [0, 0, 1, 2, 2]}, {"pipeline_stage_id": [0, 1, 1, 1, 2]}])
    assert three == [[2, expected], [1, expected]]


def test_the_command_line_names_stages() -> None:
    options = parse_options(["--pipeline-stage-id", "0,0,0,1", "--pipeline-num-layers=4"])
    assert (options.pipeline_stage_id, options.pipeline_num_layers) == ([0, 0, 0, 1], 4)
    for text in ("0,x", "0,,1", "-1,0"):
        with pytest.raises(UserError, match="pipeline-stage-id"):
            parse_options([f"--pipeline-stage-id={text}"])


@pytest.mark.parametrize("stages", [[], "0001", 3, [0, 2], [1, 2], [0, True], [0, "1"], [0, 0.5]])
def test_refuses_what_names_no_stages(stages: Any) -> None:
    with pytest.raises(UserError, match="the stage of each layer"):
        check_stages(stages)


def test_stages_are_those_that_were_named() -> None:
    assert check_stages(None) is None
    assert check_stages((0, 0, 1)) == [0, 0, 1]
