"""Checks all records, and again in a process that is forked then; for test_records.py."""

from __future__ import annotations

import os

from tests.oneflow_accel.kernels.test_records import RECORDS, test_eager


def check() -> None:
    for record in RECORDS:
        for case in record.cases:
            # Said before, as a kernel that waits for threads which a fork has not would never end.
            print(record.name, case.name, flush=True)
            test_eager(record, case, "float32")


check()
child = os.fork()
if child == 0:
    check()
    print("as before", flush=True)
    os._exit(0)
os.waitpid(child, 0)
