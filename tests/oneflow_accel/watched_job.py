"""A job of several processes for test_watchdog.py: `watched_job.py OUTPUT WHAT RANK`.

WHAT: `kill` ends process RANK with SIGKILL between two collectives, `raise` raises there, `finish`
lets RANK finish later than the others. A process that gets to its end writes OUTPUT/<rank>.done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from oneflow_accel import distributed, watchdog

OUTPUT, WHAT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def main() -> None:
    rank = distributed.rank()
    print("this line is in the buffer")
    with watchdog.guard():
        if WHAT == "kill":
            # A data worker, forked, that outlives its killed parent.
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(8,)).start()
        for step in range(3):
            distributed.all_reduce_sum([1.0])
            if step == 1 and rank == RANK:
                (OUTPUT / "pid").write_text(str(os.getpid()))
                (OUTPUT / "when").write_text(str(time.time()))
                if WHAT == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if WHAT == "raise":
                    raise ValueError("a bad batch")
        if WHAT == "finish" and rank == RANK:
            time.sleep(1)
    if WHAT == "finish":
        (OUTPUT / f"{rank}.done").write_text(str(time.time()))


if __name__ == "__main__":
    main()
