"""The CPU backend, on the CPU."""

from __future__ import annotations

import gc

from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.kernels import plugin

import numpy as np
import oneflow as flow
import pytest

STATE = {"path": None, "onednn_version": None, "num_threads": 1}


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def test_device_and_placement(backend: CpuBackend) -> None:
    assert backend.is_available()
    assert backend.device() == flow.device("cpu", 0)
    assert backend.placement() == flow.placement("cpu", [0])
    assert backend.placement([0]) == flow.placement("cpu", [0])
    with pytest.raises(ValueError, match="cpu:1: there are 1 devices"):
        backend.device(1)


def test_supported_dtypes_have_kernels_and_float16_has_none(backend: CpuBackend) -> None:
    for dtype in backend.supported_dtypes():
        ones = flow.ones(2, 2, dtype=dtype)
        np.testing.assert_array_equal(flow.matmul(ones, ones).numpy(), np.full((2, 2), 2.0))
    half = flow.ones(2, 2).to(flow.float16)
    with pytest.raises(RuntimeError, match="op_kernel_not_found"):
        flow.matmul(half, half).numpy()
    assert "take bfloat16" in backend.supports("amp").reason


def test_memory_counts_bytes_and_keeps_a_peak(backend: CpuBackend) -> None:
    before = backend.memory_allocated()
    block = np.ones(2**25, np.float64)  # 256 MiB
    during = backend.memory_allocated()
    assert before is not None
    assert during is not None
    assert 0.9 * block.nbytes < during - before < 1.5 * block.nbytes
    del block
    gc.collect()
    peak = backend.max_memory_allocated()
    assert peak is not None
    assert peak > during - 2**20  # the kernel's counters lag behind by some pages
    backend.reset_peak_memory_stats()
    after = backend.max_memory_allocated()
    assert after is not None
    assert after < peak - 2**27


def test_unknown_feature_lists_the_features(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match="unknown feature 'teleport'; features are amp, bfloat16_"):
        backend.supports("teleport")


def test_nhwc_needs_all_kernels(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ("conv2d", "conv_data_grad", "conv_filter_grad", "normalization")
    some = plugin.PluginState(loaded=True, reason=None, operators=needed, **STATE)
    monkeypatch.setattr(plugin, "state", lambda: some)
    assert backend.supports("nhwc").reason == "the CPU plug-in has no kernel for normalization_grad"
    whole = plugin.PluginState(
        loaded=True, reason=None, operators=(*needed, "normalization_grad"), **STATE
    )
    monkeypatch.setattr(plugin, "state", lambda: whole)
    assert backend.supports("nhwc")


def test_fused_transformer_operators(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    if plugin.state().loaded:
        assert backend.supports("fused_transformer")
    few = ("fused_bias_add_gelu", "fused_bias_add_gelu_grad")
    monkeypatch.setattr(
        plugin,
        "state",
        lambda: plugin.PluginState(loaded=True, reason=None, operators=few, **STATE),
    )
    assert "fused_scale_mask_softmax" in backend.supports("fused_transformer").reason
