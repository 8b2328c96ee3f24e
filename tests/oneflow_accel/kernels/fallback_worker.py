"""Plain operators on a device, for test_fallbacks.py: `check DEVICE` or `memory`, as JSON."""

from __future__ import annotations

import json
import sys

import oneflow_accel
from oneflow_accel.kernels import attention, registry
from oneflow_accel.kernels.loss import linear_cross_entropy_mean

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels import record_check
from tests.oneflow_accel.kernels.record import Case, Record

# The implementations that a device without our kernels lacks.
CPU_ROWS = (
    *("blocked_attention", "blocked_packed_attention", "tiled"),
    *("chunked_linear_cross_entropy", "chunked_linear_cross_entropy_mean"),
)
OPERATORS = ("oneflow_accel_attention", "oneflow_accel_packed_attention", "oneflow_accel_monarch")
# Smaller than in earnest, so that cases have several blocks.
BLOCK = 64
# What a pass of 4 heads, or over a vocabulary of 8,000, is measured with.
ROWS = {"attention": (2048, 4096), "loss": (4096, 8192)}


def cases() -> list[tuple[Record, Case]]:
    """The records of these operations; empty tensors go to their references."""
    return [
        (record, case)
        for record in record_check.all_records()
        if record.operators[0] in OPERATORS or record.name.startswith("linear_cross_entropy")
        for case in record.cases
        if all(0 not in shape for shape in case.shapes())
    ]


def check(device: str) -> int:
    """How many cases give the records' numbers, forward and backward."""
    for record, case in cases():
        arrays = record_check.arrays_in(case, "float32")
        leaves = record_check.tensors_of(arrays, "float32", gradient=True)
        y = record.call(*[leaf.to(device) for leaf in leaves], **case.attributes)
        dy = record_check.output_gradient(tuple(y.shape))
        y.backward(flow.tensor(dy).to(device))
        print(record.name, case.name, flush=True)
        record_check.assert_output(record, case, arrays, y.numpy(), "float32")
        found = record_check.tensor_gradients(leaves)
        record_check.assert_gradients(record, case, arrays, dy, found, "float32")
    return len(cases())


def peak(operation: str, rows: int) -> int:
    """Bytes of a forward and backward pass, beside its inputs."""
    shapes = {"attention": [(1, n, rows, 32) for n in (4, 2, 2)], "loss": [(rows, 32), (8000, 32)]}
    backend = oneflow_accel.current_backend()
    tensors = [flow.ones(*s, device=backend.name, requires_grad=True) for s in shapes[operation]]
    labels = flow.tensor(np.arange(rows) % 8000).to(backend.name)
    backend.synchronize()
    backend.empty_cache()
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    if operation == "loss":
        linear_cross_entropy_mean(*tensors, labels).backward()
    else:
        attention.scaled_dot_product_attention(*tensors, causal=True).sum().backward()
    backend.synchronize()
    return backend.max_memory_allocated() - before


if __name__ == "__main__":
    oneflow_accel.select_device(sys.argv[2])
    with registry.disabled(*CPU_ROWS):
        if sys.argv[1] == "memory":
            found = {name: [peak(name, rows) for rows in each] for name, each in ROWS.items()}
            print("found", json.dumps(found))
        else:
            attention.BLOCK = BLOCK
            print("found", check(sys.argv[2]))
