"""Runs each record's case "global", or those of the records that are named, in each of its layouts
on two processes, for test_records.py and test_fallbacks.py."""

from __future__ import annotations

import json
import re
import sys
import traceback

import oneflow_accel  # noqa: F401

import numpy as np
import oneflow as flow

from tests.oneflow_accel.kernels.record import Case, Layout, Record
from tests.oneflow_accel.kernels.record_check import (
    GLOBAL_CASE,
    all_records,
    assert_gradients,
    assert_output,
    case_named,
    is_float,
    layout_name,
    output_gradient,
)


def _sbp(text: str) -> flow.sbp.sbp:
    split = re.fullmatch(r"S\((\d+)\)", text)
    if split:
        return flow.sbp.split(int(split.group(1)))
    return {"B": flow.sbp.broadcast, "P": flow.sbp.partial_sum}[text]


def _run(record: Record, case: Case, layout: Layout) -> None:
    placement = flow.placement("cpu", ranks=[0, 1])
    arrays = case.arrays()
    leaves, inputs = [], []
    for array, sbp in zip(arrays, layout.inputs, strict=True):
        leaf = flow.tensor(array, placement=placement, sbp=flow.sbp.broadcast)
        leaf.requires_grad = is_float(array) and record.gradient is not None
        leaves.append(leaf)
        inputs.append(leaf.to_global(sbp=_sbp(sbp)))
    y = record.call(*inputs, **case.attributes)
    assert y.sbp == (_sbp(layout.output),), f"the output lies as {y.sbp}"
    whole = y.to_global(sbp=flow.sbp.broadcast)
    assert_output(record, case, arrays, whole.to_local().numpy(), "float32")
    if record.gradient is not None:
        dy = output_gradient(tuple(y.shape))
        weight = flow.tensor(dy, placement=placement, sbp=flow.sbp.broadcast)
        (whole * weight).sum().backward()
        actual: list[np.ndarray | None] = [
            None
            if leaf.grad is None
            else leaf.grad.to_global(sbp=flow.sbp.broadcast).to_local().numpy()
            for leaf in leaves
        ]
        assert_gradients(record, case, arrays, dy, actual, "float32")


def main() -> None:
    for record in all_records():
        if sys.argv[1:] and record.name not in sys.argv[1:]:
            continue
        for layout in record.layouts:
            try:
                _run(record, case_named(record, GLOBAL_CASE), layout)
                result = "equal"
            # Whatever goes wrong is the result of this one; the next ones run.
            except Exception:
                result = traceback.format_exc()
            if flow.env.get_rank() == 0:
                line = json.dumps({f"{record.name}-{layout_name(layout)}": result})
                print(f"record {line}\n", end="", flush=True)


if __name__ == "__main__":
    main()
