"""`python -m oneflow_accel kernels`: operators that the plug-in has, in some dtypes, or not."""

from __future__ import annotations

import json

from oneflow_accel import report, settings
from oneflow_accel.errors import UserError
from oneflow_accel.kernels import plugin

import pytest

from tests.launch import run_process
from tests.oneflow_accel.kernels.harness import needs_plugin


@needs_plugin
def test_all_operators_of_the_plugin_are_listed() -> None:
    choices = report.kernel_choices()
    assert [choice.operator for choice in choices] == list(plugin.state().operators)
    others = {choice.operator for choice in choices if choice.kernels["float32"] != "plug-in"}
    # Their inputs and outputs differ in dtype.
    assert others == {"cast", "random_mask_like"}


@needs_plugin
def test_an_operator_of_both_runs_on_the_plugin_in_its_dtypes() -> None:
    (choice,) = report.kernel_choices(["relu_grad"])
    assert choice.kernels == {"float32": "plug-in", "float64": "oneflow", "bfloat16": "plug-in"}
    assert choice.why == "the plug-in's has the higher priority"


@needs_plugin
def test_copies_and_what_inference_needs_run_on_the_plugin_in_bfloat16() -> None:
    copies = "transpose to_contiguous concat slice narrow expand gather embedding"
    others = "oneflow_accel_conv2d fused_matmul_bias layer_norm gelu silu relu add_n"
    for choice in report.kernel_choices([*copies.split(), *others.split()]):
        assert choice.kernels["bfloat16"] == "plug-in", choice.operator


@needs_plugin
def test_an_unknown_operator_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no operator 'layernorm'; names like it: .*layer_norm"):
        report.kernel_choices(["layernorm"])


@needs_plugin
def test_the_command_prints_json() -> None:
    result = run_process(["-m", "oneflow_accel", "kernels", "relu", "acos", "--json"])
    assert result.returncode == 0, result.stdout
    choices = json.loads(result.stdout[result.stdout.index("[\n") :])
    assert [choice["operator"] for choice in choices] == ["relu", "acos"]
    # OneFlow would take either of two of one priority, and warn at every first use.
    assert "more than one kernels" not in result.stdout


def test_without_the_plugin_it_says_why() -> None:
    result = run_process(["-m", "oneflow_accel", "kernels"], env={settings.PLUGIN.name: "off"})
    assert result.returncode == 2
    assert "switched off by ONEFLOW_ACCEL_PLUGIN=off" in result.stdout
    assert "Traceback" not in result.stdout
