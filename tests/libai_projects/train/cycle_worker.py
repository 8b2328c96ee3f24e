"""Runs the training command several times in the processes of one start, for test_mode_cycle.py.

cycle_worker.py '[["graph.enabled=true", "--resume", ...], ...]': each list is for train_net.py.
"""

from __future__ import annotations

import json
import sys

from oneflow_accel import distributed, watchdog
from oneflow_accel.errors import UserError

from libai_projects.tools import train_net

# Freeing a graph waits until all processes free theirs.
_KEPT: list[object] = []


def main() -> None:
    for arguments in json.loads(sys.argv[1]):
        _KEPT.append(train_net.execute(train_net.prepare(arguments)))


if __name__ == "__main__":
    try:
        with watchdog.guard():
            main()
            distributed.settle()
    except UserError as error:
        print(f"user error: {error}\n", end="", flush=True)
        train_net._leave(UserError.EXIT_CODE)
    # As the command ends: without freeing what the others still use.
    train_net._leave(0)
