"""Runs checks until one fails: python -m oneflow_accel.conformance.child DEVICE FILE NUMBER...

A process of its own, or one of two, that a check may end. It adds a line of JSON to FILE where a
check begins, and one where it ends. What comes after a failure would say little: the parent goes on
in another process.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any

import oneflow_accel
from oneflow_accel import command, distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.conformance.checks import CHECKS, Check, NotSupportedError

PASS, FAIL, NOT_SUPPORTED = "pass", "fail", "not supported"


def main() -> int:
    device, path, *numbers = sys.argv[1:]
    with open(path, "a") as file:

        def say(number: int, **what: Any) -> None:
            file.write(json.dumps({"number": number, **what}) + "\n")
            file.flush()

        backend = oneflow_accel.select_device(device)
        for number in map(int, numbers):
            check = CHECKS[number]
            support = backend.supports(check.needs) if check.needs else None
            lacks = None if support is None or support else support.reason
            say(number, lacks=lacks)
            begin = time.monotonic()
            status, reason = _result(backend, check, lacks)
            say(number, status=status, reason=reason, seconds=round(time.monotonic() - begin, 3))
            if status == FAIL:
                # It may be unable to end by itself.
                os._exit(1)
    return 0


def _result(backend: Backend, check: Check, lacks: str | None) -> tuple[str, str]:
    if distributed.local_world_size() > backend.device_count():
        return NOT_SUPPORTED, f"it takes {distributed.local_world_size()} devices"
    try:
        check.run(backend)
        backend.synchronize()
    except NotSupportedError as error:
        return NOT_SUPPORTED, str(error)
    # Code of a backend, and OneFlow on it, may raise anything.
    except Exception as error:
        if lacks is not None:
            return NOT_SUPPORTED, lacks
        kernel = _lacking_kernel(str(error))
        if kernel is not None and check.needs is None:
            return NOT_SUPPORTED, kernel
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # NumPy says first what is wrong, OneFlow last.
        told = lines[:4] if isinstance(error, AssertionError) else lines[-1:]
        return FAIL, kernel or f"{type(error).__name__}: {' '.join(told)}"
    if lacks is not None:
        return NOT_SUPPORTED, f"{lacks} (but the check of it passes)"
    return PASS, ""


def _lacking_kernel(text: str) -> str | None:
    """What OneFlow says where an operator has no kernel for the device and these types."""
    if "Cannot find the kernel matching" not in text:
        return None
    operator = re.search(r"op_type_name: (\w+)", text)
    types = sorted(set(re.findall(r"DataType_Name of \w+: k(\w+)", text)))
    return f"no kernel of {operator[1] if operator else 'an operator'} for {', '.join(types)}"


if __name__ == "__main__":
    sys.exit(command.run("conformance", main))
