"""scripts/journey.py counts the modules of a training step."""

from __future__ import annotations

import pytest

from scripts import golden_record
from tests.launch import REPOSITORY, run_process


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The golden record's folder, with its data, which tests share."""
    folder = tmp_path_factory.getbasetemp() / "golden"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden_record, "WORK", folder)
        golden_record.write_data(folder / "data")
    return {"GOLDEN_RECORD": str(folder)}


def journey(environment: dict[str, str], *typed: str) -> dict[str, list[str]]:
    """Functions by module; the last line has the sum, by packages too."""
    done = run_process([REPOSITORY / "scripts" / "journey.py", *typed], env=environment)
    assert done.returncode == 0, done.stdout
    *lines, last = done.stdout.splitlines()
    found = {path: names.split(", ") for path, names in (line.split(": ") for line in lines)}
    total, packages = last.split(" modules: ")
    parts = [part.split(" of ") for part in packages.split(", ")]
    assert int(total) == sum(int(count) for count, _ in parts) == len(found)
    for count, name in parts:
        assert int(count) == sum(path.startswith(f"{name}/") for path in found)
    return found


def test_a_step_enters_what_trains_and_nothing_that_was_done_before(
    environment: dict[str, str],
) -> None:
    found = journey(environment, "step", "--main", "monarch")
    entered = {
        "flow_train/loop.py",
        "flow_train/data/images.py",
        "flow_train/metrics/log.py",
        "monarch_flow/models/vit.py",
        "oneflow_accel/kernels/monarch.py",
    }
    assert entered <= found.keys()
    # Options, the model and the first checkpoint were made before, and a run ends later.
    assert not [path for path in found if "/config" in path or "build.py" in path]
    assert not [path for path in found if "checkpoint" in path or path.endswith("run.py")]
    assert found["monarch_flow/models/vit.py"] == ["features"]
