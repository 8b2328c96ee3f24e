"""Records in a process of its own, for test_records.py and others.

`check [NAMES...]`: all cases, or those of the records that are named, as in test_records.py, also
in bfloat16. `digests`: of each record's largest case, in this process and in one that is forked
then.
"""

from __future__ import annotations

import hashlib
import os
import sys

import oneflow_accel  # noqa: F401

from tests.oneflow_accel.kernels.record_check import largest_case, results
from tests.oneflow_accel.kernels.test_records import RECORDS, test_eager


def check(names: list[str]) -> None:
    for record in RECORDS:
        if names and record.name not in names:
            continue
        for case in record.cases:
            for dtype in record.dtypes:
                print(record.name, case.name, dtype, flush=True)
                test_eager(record, case, dtype)
    print("all as in the records")


def digests(process: str) -> None:
    for record in RECORDS:
        # Said before, as a kernel that waits for threads which a fork has not would never end.
        print(record.name, flush=True)
        found = results(record, largest_case(record))
        print(f"digest {record.name}:", hashlib.sha256(found.tobytes()).hexdigest(), flush=True)
    print(f"end of {process}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(sys.argv[2:])
    else:
        digests("the parent")
        child = os.fork()
        if child == 0:
            digests("the child")
            os._exit(0)
        os.waitpid(child, 0)
