"""Runs run_vit_training.py several times in the processes of one start: `vit_worker.py JSON`, a
list of command lines."""

from __future__ import annotations

import json
import sys

from oneflow_accel import command, distributed

from vit_10b import run_vit_training


def main(lines: list[list[str]]) -> int:
    for line in lines:
        run_vit_training.run(line)
        # The next may read what this one has written.
        distributed.barrier()
    return 0


if __name__ == "__main__":
    command.log_to_stdout()
    sys.exit(command.run("vit_worker.py", lambda: main(json.loads(sys.argv[1]))))
