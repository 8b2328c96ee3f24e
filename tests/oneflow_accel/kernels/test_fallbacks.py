"""What runs where a device has no kernel of ours: plain operators, held to the records of the CPU's
kernels, in memory that grows with the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oneflow_accel import settings
from oneflow_accel.kernels import attention, loss, registry

import oneflow as flow
import pytest

from tests.launch import run_distributed, run_process
from tests.oneflow_accel.kernels import fallback_worker as worker
from tests.oneflow_accel.kernels import test_records as on_records
from tests.oneflow_accel.kernels.harness import needs_plugin
from tests.oneflow_accel.kernels.record import Case, Record

CASES = [pytest.param(*each, id=f"{each[0].name}-{each[1].name}") for each in worker.cases()]
# Masks are drawn in NumPy, which no graph waits for, and graphs of many chunks compile for long.
IN_GRAPH = [
    each
    for each in CASES
    if each.values[1].name in ("odd", "global") and "dropout" not in each.values[1].attributes
]


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "BLOCK", worker.BLOCK)
    with registry.disabled(*worker.CPU_ROWS):
        yield


def run(*arguments: str, **environment: str) -> Any:
    done = run_process([Path(worker.__file__), *arguments], env=environment)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.partition("found ")[2])


@needs_plugin
@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize(("record", "case"), CASES)
def test_eager(record: Record, case: Case) -> None:
    """Float32 is that of the other tests."""
    on_records.test_eager(record, case, "float64")
    if "bfloat16" in record.dtypes:
        on_records.test_eager(record, case, "bfloat16")


@needs_plugin
@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize(("record", "case"), IN_GRAPH)
def test_graph(record: Record, case: Case) -> None:
    on_records.check_graph(record, case)


@needs_plugin
def test_on_the_emulated_device() -> None:
    assert run("check", "emulated") == len(CASES)


@needs_plugin
def test_global_tensors_stay_as_they_lie() -> None:
    names = sorted({record.name for record, _ in worker.cases()})
    command = ["-m", "tests.oneflow_accel.kernels.global_records", *names]
    done = run_distributed(command, 2, env={settings.DISABLE.name: ",".join(worker.CPU_ROWS)})
    found = [line for line in done.stdout.splitlines() if line.startswith("record ")]
    assert len(found) > 20, done.stdout
    # Two are right, and lie elsewhere: plain sums and products have moved them.
    assert [line for line in found if '"equal"' not in line and "output lies" not in line] == []
    assert sum('"equal"' in line for line in found) >= len(found) - 2


@needs_plugin
def test_memory_grows_with_the_rows() -> None:
    """References take 4 times as much for twice the keys, and all logits."""
    found = run("memory", "emulated")
    once, twice = found["attention"]
    assert twice < 2.6 * once
    # Half of the weights alone, of 4 heads in float32.
    assert twice < 4 * worker.ROWS["attention"][1] ** 2 * 4 / 2
    once, twice = found["loss"]
    assert twice < 1.2 * once
    assert twice < 10 * loss._BYTES


@needs_plugin
@pytest.mark.usefixtures("by_blocks")
def test_it_is_chosen_where_there_is_no_kernel() -> None:
    x = flow.ones(1, 2, 3, 4)
    operation = registry.operations()["scaled_dot_product_attention"]
    assert operation.choose(x, x, x, causal=True, scale=1.0) is attention.chunked_attention
    assert "CHOSEN: chunked_attention (any device" in registry.explain(operation.name, "mlu")
    # As --attn_impl=naive does.
    with registry.disabled(operation.name):
        assert operation.choose(x, x, x, causal=True, scale=1.0) is operation.reference
