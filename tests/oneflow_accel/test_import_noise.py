"""Two messages of oneflow's import are left out, and not a byte of anything else is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run_process

RDMA = "libibverbs not available, ibv_fork_init skipped\n"
CUDA = (
    "W20261122 14:46:26.242918  6339 cuda_device_descriptor_class.cpp:48] CUDA driver version is "
    "insufficient for CUDA runtime version\n"
)
OTHERS = (
    "E20261122 14:46:26.242918  6339 cuda_device_descriptor_class.cpp:48] out of memory\n"
    "W20261122 14:46:26.242918  6339 env.cpp:48] CUDA driver version is what it is\n"
    "libibverbs not available\n"
    "see: " + RDMA + "Warning: continue? [y/n] "
)
# Stands for oneflow, whose C++ code says all this and then ends in one way or another.
FAKE = f"""
import ctypes, os, signal, subprocess, sys, threading
def say(text):
    try: os.write(2, text.encode())
    except OSError: pass  # closed
say("first\\n" + {RDMA!r})
say({CUDA!r})
try: print("from Python", file=sys.stderr)
except OSError: pass
say({OTHERS!r})
{{end}}
say("rest\\n")
"""
# The way the fake import ends: what comes after OTHERS on stderr, and the exit code.
ENDS = {
    "well": ("", "rest\nafter\n", 0),
    "with a large output": ("say('x' * 300_000 + '\\n')", "x" * 300_000 + "\nrest\nafter\n", 0),
    "aborted": ("say('last words'); ctypes.CDLL(None).abort()", "last words", -6),
    "killed": ("say('last words'); os.kill(os.getpid(), 9)", "last words", -9),
    "in an error": ("raise SystemExit('no oneflow')", "no oneflow\n", 1),
    "with a thread": (
        "t = threading.Thread(target=say, args=('thread\\n',)); t.start(); t.join()",
        "thread\nrest\nafter\n",
        0,
    ),
    "with a fork": (
        "pid = os.fork()\nif not pid: say('child\\n'); os._exit(0)\nos.waitpid(pid, 0)",
        "child\nrest\nafter\n",
        0,
    ),
    # Longer than the import: it has its stderr all the same.
    "with a program that goes on": (
        "subprocess.Popen(['sh', '-c', 'sleep 3; echo later >&2'])",
        "rest\nafter\nlater\n",
        0,
    ),
}
PROGRAM = """
import sys
import import_noise
with import_noise.left_out():
    import oneflow
print("after", file=sys.stderr)
"""


def run(folder: Path, end: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """A program that imports a fake oneflow; the device layer itself is not imported."""
    (folder / "oneflow.py").write_text(FAKE.replace("{end}", end))
    (folder / "import_noise.py").symlink_to(REPOSITORY / "oneflow_accel" / "import_noise.py")
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize("end", ENDS)
def test_nothing_else_is_lost_where_the_import_ends(end: str, tmp_path: Path) -> None:
    code, expected, status = ENDS[end]
    process = run(tmp_path, code)
    assert process.stderr == "first\nfrom Python\n" + OTHERS + expected
    assert process.returncode == status


@pytest.mark.parametrize(
    "change",
    [
        "import os; os.close(2)",
        "import os; os.environ['PATH'] = ''",
        "import os; os.close(0); os.close(1)",
    ],
    ids=["stderr-closed", "no-sed", "others-closed"],
)
def test_the_import_goes_on_where_nothing_can_be_filtered(change: str, tmp_path: Path) -> None:
    end = "open('ended', 'w').close()"
    program = PROGRAM.replace("import import_noise", "import import_noise\n" + change)
    process = run(tmp_path, f"import os; os.chdir({str(tmp_path)!r}); {end}", program)
    assert (tmp_path / "ended").exists(), process.stderr
    if "close(2)" not in change:
        assert process.stderr.endswith(OTHERS + "rest\nafter\n")


def test_importing_oneflow_accel_prints_nothing() -> None:
    process = run_process(["-c", "import oneflow_accel"])
    assert (process.stdout, process.returncode) == ("", 0)
