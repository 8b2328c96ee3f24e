"""What only several processes show: `two_process_cases.py NAME` (test_libai_two_processes.py)."""

from __future__ import annotations

import sys

# First: it decides which patches libai gets.
import tests.libai_projects.patches.partial_series  # noqa: F401

# isort: split

import numpy as np
import oneflow as flow
from libai.data.structures import DistTensorData
from libai.utils import distributed
from omegaconf import OmegaConf

from tests.libai_projects.patches import layout_worker


def masks() -> None:
    """Dropout masks differ between parts of a split tensor and agree on copies of another one."""
    from libai.layers import MLP

    distributed.setup_dist_util(
        OmegaConf.create({"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    )
    # As a data-parallel run may: each rank seeds with a number of its own.
    flow.manual_seed(7 + flow.env.get_rank())
    layer = MLP(8, 8, output_dropout_prob=0.5).dropout
    ones = flow.ones(400, 8, placement=distributed.get_layer_placement(0), sbp=flow.sbp.broadcast)
    copies = layer(ones).to_local().numpy()
    halves = distributed.tton(layer(ones.to_global(sbp=flow.sbp.split(0))))
    assert (halves[:200] != halves[200:]).any(), "the parts have the same mask"
    theirs = flow.tensor(copies).to_global(
        placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0)
    )
    first, second = np.split(distributed.tton(theirs), 2)
    assert (first == second).all(), "the copies have different masks"
    assert set(np.unique(first)) == {0, 2}


def labels() -> None:
    """Labels on the last stage are those of the first stage's data, whatever its ranks read."""
    distributed.setup_dist_util(
        OmegaConf.create(
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "pipeline_num_layers": 2}
        )
    )
    data = DistTensorData(flow.tensor([[flow.env.get_rank()]]), placement_idx=-1)
    data.to_global()
    assert data.tensor.placement == distributed.get_layer_placement(-1)
    # Every rank looks, so that none waits for one that has failed.
    everywhere = flow.placement("cpu", [0, 1])
    seen = data.tensor.to_global(placement=everywhere, sbp=flow.sbp.broadcast).to_local()
    assert seen.numpy().tolist() == [[0]]


def pipeline_graph() -> None:
    """A graph moves the tied word embedding to the last stage."""
    layout_worker.run(layout_worker.Row(graph=True, pipeline=2))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"masks": masks, "labels": labels, "pipeline_graph": pipeline_graph}[name]()
        flow.comm.barrier()
        if distributed.is_main_process():
            print(f"holds: {name}\n", end="", flush=True)
