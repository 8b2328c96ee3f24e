"""Runs a command several times in the processes of one start: `several_runs.py MODULE JSON`, the
module whose main(argv) it is and a list of command lines. A launcher starts it, or nothing does.

In a command line {rank} is the process's, so that each can have a folder of its own, as on machines
without a common disk."""

from __future__ import annotations

import importlib
import json
import sys

from oneflow_accel import distributed


def main(name: str, lines: list[list[str]]) -> int:
    module = importlib.import_module(name)
    for line in lines:
        code = module.main([word.replace("{rank}", str(distributed.rank())) for word in line])
        if code:
            return int(code)
        # The next may read what this one has written.
        distributed.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
