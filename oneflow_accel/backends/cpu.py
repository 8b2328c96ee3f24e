"""Plain CPUs, on OneFlow's stock kernels or those of the C++ plug-in."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from oneflow_accel import machine, settings
from oneflow_accel.backends import profile
from oneflow_accel.backends.base import Backend, DeviceProperties
from oneflow_accel.kernels import plugin

import oneflow as flow

logger = logging.getLogger("oneflow_accel")

# Features that stock kernels lack, and the operators that the plug-in must have for them.
_PLUGIN_OPERATORS = {
    "nhwc": "conv2d conv_data_grad conv_filter_grad normalization normalization_grad",
    "fused_bn_add_relu_train": "normalization_add_relu normalization_add_relu_grad",
    "bfloat16_inference": "oneflow_accel_conv2d matmul layer_norm",
    "bfloat16_training": "matmul conv2d oneflow_accel_attention_grad",
    "bfloat16_products": "matmul conv2d",
    "native_layer_norm": "layer_norm layer_norm_grad layer_norm_param_grad",
    "fused_transformer": (
        "fused_bias_add_gelu fused_bias_add_gelu_grad fused_bias_add_mask_scale "
        "fused_scale_mask_softmax fused_scale_mask_softmax_grad "
        "fused_scale_mask_softmax_dropout fused_scale_mask_softmax_dropout_grad "
        "fused_tril_scale_softmax_mask_scale fused_tril_scale_softmax_mask_scale_grad"
    ),
}
# What can be emulated; inference in bfloat16 is for speed alone.
_EMULATED = ("bfloat16_training", "bfloat16_products")
_COMPUTE_ON_WORKER_THREAD = "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CPU_INFO = Path("/proc/cpuinfo")


class CpuBackend(Backend):
    """The processors of this machine.

    OneFlow calls the CPU of the process with local rank r `cpu:r`, so there is one device per
    process on this node. `memory_allocated()` is the resident set of this process and
    `max_memory_allocated()` the kernel's record of its peak (VmRSS, VmHWM: proc(5)).
    """

    name: ClassVar[str] = "cpu"
    # OneFlow's own collectives over TCP or RDMA.
    collective_backend: ClassVar[str] = "ccl"
    shares_memory: ClassVar[bool] = True
    _lacks: ClassVar[Mapping[str, str]] = {
        "amp": "CPUs have no kernels in float16; take bfloat16, or float32",
        "bfloat16_collectives": "OneFlow adds up no bfloat16 of several CPUs; float32 is sent",
    }

    def prepare(self) -> None:
        super().prepare()
        # By default OneFlow's scheduler thread spins while another thread runs the kernel, which
        # takes a core's share from the kernel's own threads, and a small operation waits until one
        # has woken the other.
        os.environ.setdefault(_COMPUTE_ON_WORKER_THREAD, "0")

    def activate(self) -> None:
        super().activate()
        # Raises what is wrong with the plug-in's environment variables.
        plugin.load()

    def empty_cache(self) -> None:
        super().empty_cache()
        plugin.release_memory()
        # OneFlow returns its blocks to malloc, which keeps those below 32 MB (mallopt(3)).
        ctypes.CDLL(None).malloc_trim(0)

    def device_count(self) -> int:
        return max(1, flow.env.get_world_size() // flow.env.get_node_size())

    def max_memory_allocated(self) -> int | None:
        return _status_bytes("VmHWM")

    def reset_peak_memory_stats(self) -> None:
        try:
            # 5: set the peak to the present size (proc(5)).
            _CLEAR_REFS.write_text("5")
        except OSError as error:
            logger.warning("peak memory counts from the start of the process: %s", error)

    def properties(self) -> DeviceProperties:
        # The peak differs by instruction set and clock; a measured matmul gives it.
        return DeviceProperties(_cpu_name(), machine.memory(), {"float32": None, "float64": None})

    def supported_dtypes(self) -> tuple[flow.dtype, ...]:
        other = profile.active()
        has = (flow.float32, flow.float64)
        return has if other is None else tuple(t for t in has if str(t)[8:] in other.dtypes)

    def _problems(self) -> list[str]:
        return []

    def _why_not(self, feature: str) -> str | None:
        other = profile.active()
        reason = None if other is None else other.why_not(feature)
        if reason is not None:
            return reason
        needed = _PLUGIN_OPERATORS.get(feature)
        if needed is None:
            return super()._why_not(feature)
        state = plugin.state()
        if not state.loaded:
            return f"it needs the CPU plug-in, which is not loaded: {state.reason}"
        lacking = sorted(set(needed.split()) - set(state.operators))
        if lacking:
            return f"the CPU plug-in has no kernel for {', '.join(lacking)}"
        if feature.startswith("bfloat16") and not state.fast_bfloat16:
            lacks = (
                "this CPU, or ONEDNN_MAX_CPU_ISA or ONEFLOW_ACCEL_ISA, has no AVX-512 BF16 "
                "instructions"
            )
            if feature not in _EMULATED:
                return lacks
            if not settings.EMULATE_BFLOAT16.get():
                return (
                    f"{lacks}; {settings.EMULATE_BFLOAT16.name}=1 computes the same by way of "
                    "float32, slower than float32"
                )
        return None

    def _memory_used(self) -> int:
        return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{_STATUS} has no {field}")
    return int(match.group(1)) * 1024


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
    return match.group(1) if match else platform.machine()
