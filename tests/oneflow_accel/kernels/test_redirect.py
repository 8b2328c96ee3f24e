"""The functions of OneFlow's that the plug-in replaces: which can be, and what the report says."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from oneflow_accel import report
from oneflow_accel.kernels import plugin

import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin

_COMPILER = shutil.which(os.environ.get("CXX", "c++"))


# Full RELRO makes the slots read-only: writing there would be a segmentation fault.
@pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize(
    ("flags", "possible"),
    [
        (("lazy",), True),
        (("lazy", "norelro"), True),
        (("now", "norelro"), True),
        (("now", "relro"), False),
    ],
)
def test_a_slot_is_replaced_only_where_it_can_be_written(
    tmp_path: Path, flags: tuple[str, ...], possible: bool
) -> None:
    source = tmp_path / "library.cpp"
    source.write_text('#include <sched.h>\nextern "C" int call() { return sched_yield(); }\n')
    library = tmp_path / f"lib{'_'.join(flags)}_{os.getpid()}.so"
    link = [f"-Wl,-z,{flag}" for flag in flags]
    command = [str(_COMPILER), "-shared", "-fPIC", "-fplt", str(source), *link, "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    assert ctypes.CDLL(str(library)).call() == 0
    can_redirect = ctypes.CDLL(str(plugin.state().path)).oneflow_accel_can_redirect
    assert can_redirect(library.name.encode(), b"sched_yield") == possible
    assert not can_redirect(library.name.encode(), b"sched_getcpu")
    assert not can_redirect(b"no_such_library", b"sched_yield")


def test_this_build_of_oneflow_lets_all_be_replaced() -> None:
    redirections = plugin.state().redirections
    assert all(redirection.done for redirection in redirections)
    purposes = {redirection.purpose for redirection in redirections}
    assert purposes == set(plugin._REDIRECTED_FOR)
    assert len(redirections) >= 7


def test_the_report_carries_them() -> None:
    rows = report.collect()["plugin"]["redirections"]
    assert {"sched_yield"} < {row["function"] for row in rows}
    assert set(rows[0]) == {"function", "library", "purpose", "done"}


def test_what_could_not_be_replaced_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = plugin.state()
    failed = tuple(
        replace(redirection, done="NNGraph" not in redirection.function)
        for redirection in state.redirections
    )
    monkeypatch.setattr(plugin, "_load", lambda: replace(state, redirections=failed))
    with caplog.at_level(logging.WARNING, "oneflow_accel"):
        plugin.load.__wrapped__()
    assert len(caplog.messages) == 1
    assert "a small nn.Graph that ends early does not break the heap" in caplog.messages[0]
