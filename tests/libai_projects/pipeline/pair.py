"""pipeline.py on two processes that share a small random model."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

from launch import REPOSITORY, free_port
from pipeline_fakes import write_vocabulary


class Pair:
    """pipeline.py with `options` on two processes, which share a small random model."""

    def __init__(self, folder: Path, *options: str) -> None:
        vocab, merges = write_vocabulary(folder)
        sizes = ["hidden_size=32", "ffn_hidden_size=64", "num_attention_heads=4", "num_layers=2"]
        # Closed at the end; the process writes to it until then.
        self._errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "2"),
                *("--master_port", str(free_port()), "projects/MagicPrompt/pipeline.py"),
                *("--mode", "random", "--vocab-file", str(vocab), "--merges-file", str(merges)),
                *(f"model.cfg.{size}" for size in [*sizes, "max_seq_length=64"]),
                *options,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=REPOSITORY / "libai_projects",
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "ONEFLOW_ACCEL_THREADS": "1"},
            start_new_session=True,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            # The launcher has its own.
            if line.startswith((b"{", b"MagicPrompt is at")):
                self._lines.put(line)

    def read(self) -> bytes:
        try:
            return self._lines.get(timeout=120)
        except queue.Empty:
            raise AssertionError(self.errors()) from None

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()
