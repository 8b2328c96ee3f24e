"""Ranks and sums, alone and over processes of oneflow.distributed.launch."""

from __future__ import annotations

import json

from oneflow_accel import distributed

import pytest

from tests.launch import run_distributed

PROGRAM = """
import gc, json, sys, time
from oneflow_accel import agree, distributed as d
import numpy as np
import oneflow as flow
if d.rank() == 1:
    time.sleep(1)
started = time.monotonic()
d.barrier()
waited = time.monotonic() - started
whole = np.arange(15, dtype=np.float32).reshape(5, 3)
set_values = []
for layout in (flow.sbp.split(0), flow.sbp.split(1), flow.sbp.broadcast):
    tensor = flow.zeros(5, 3, placement=flow.placement.all("cpu"), sbp=layout)
    d.set_value(tensor, whole)
    set_values.append(bool((agree.whole(tensor, to=None).numpy() == whole).all()))

class Twice(flow.nn.Graph):
    def build(self, x):
        return (x * 2).to_global(sbp=flow.sbp.broadcast)

graph = Twice()
doubled = graph(tensor.to_global(sbp=flow.sbp.split(0))).to_local().numpy()
graph.itself = graph
if not sys.argv[2:]:
    d.end_graph(graph)
del graph
if d.rank() == 0:
    # Ends a graph that is still there, and then the others wait for this process.
    gc.collect()
facts = {
    "doubled": bool((doubled == 2 * whole).all()),
    "set_values": set_values,
    "rank": d.rank(), "local": [d.local_rank(), d.local_world_size()], "world": d.world_size(),
    "main": d.is_main(), "waited": waited,
    "sum": d.all_reduce_sum([d.rank() + 1, 0.25, 2.0**40 + d.rank()]),
    "gathered": d.all_gather_json({"rank": d.rank(), "text": "\\u00e9" * d.rank(), "big": 2**80}),
}
with open(sys.argv[1] + f"/{d.rank()}.json", "w") as file:
    json.dump(facts, file)
"""


def test_one_process():
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert (distributed.local_rank(), distributed.local_world_size()) == (0, 1)
    assert distributed.is_main()
    assert distributed.all_reduce_sum([1, 2.5]) == [1.0, 2.5]
    assert distributed.all_gather_json({"a": 1}) == [{"a": 1}]
    distributed.barrier()


@pytest.mark.parametrize("nproc", [2])
def test_several_processes(tmp_path, nproc):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_distributed([program, tmp_path], nproc, timeout=90)
    assert result.returncode == 0, result.stdout
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(nproc)]
    assert [fact["rank"] for fact in facts] == list(range(nproc))
    assert [fact["local"] for fact in facts] == [[rank, nproc] for rank in range(nproc)]
    assert [fact["main"] for fact in facts] == [True] + [False] * (nproc - 1)
    assert all(fact["doubled"] for fact in facts)
    for fact in facts:
        assert fact["world"] == nproc
        # Parts of 3 and 2 rows, of 2 columns and 1, and the whole.
        assert fact["set_values"] == [True] * 3
        # Whole numbers beyond float32's 2**24 stay exact.
        assert fact["sum"] == [3.0, 0.5, 2.0**41 + 1]
        assert fact["gathered"] == [
            {"rank": rank, "text": "\u00e9" * rank, "big": 2**80} for rank in range(nproc)
        ]
    assert facts[0]["waited"] > 0.3
