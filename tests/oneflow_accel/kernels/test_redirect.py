"""The functions of OneFlow's that the plug-in replaces: which can be, and what the report says."""

from __future__ import annotations

import logging
from dataclasses import replace

from oneflow_accel.kernels import plugin

import pytest

from tests.oneflow_accel.kernels.harness import needs_plugin

pytestmark = needs_plugin


def test_this_build_of_oneflow_lets_all_be_replaced() -> None:
    redirections = plugin.state().redirections
    assert all(redirection.done for redirection in redirections)
    purposes = {redirection.purpose for redirection in redirections}
    assert purposes == set(plugin._REDIRECTED_FOR)
    assert len(redirections) >= 7


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
