"""NVIDIA GPUs, from Pascal (sm_60) to Ampere (sm_86): what the oneflow 0.9.0 wheel has code for.

Written from the sources of oneflow 0.9.0 and tested with a fake driver library; it has not run on
a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

from oneflow_accel.backends import nvml
from oneflow_accel.backends.base import Backend, DeviceProperties
from oneflow_accel.backends.cuda_peaks import peak_flops

import oneflow as flow
import oneflow.sysconfig

# The wheel holds machine code for these compute capabilities and no PTX that a newer GPU's driver
# could compile.
OLDEST_CAPABILITY = (6, 0)
NEWEST_CAPABILITY = (8, 6)
# A CUDA 11.7 build runs on every driver of CUDA 11 (NVIDIA, "CUDA Compatibility", minor version
# compatibility: 450.80.02 and later on Linux).
OLDEST_DRIVER_CUDA = (11, 0)
# OneFlow's attention for inference ends the process on older ones.
_ATTENTION_CAPABILITY = (7, 0)
_BFLOAT16_CAPABILITY = (8, 0)
_MIB = 2**20


class CudaBackend(Backend):
    """NVIDIA GPUs through CUDA.

    `memory_allocated()` counts what is in use on the current GPU, by every process and with
    OneFlow's cached blocks: oneflow 0.9.0 has no counter of tensors, nor of a peak.
    """

    name: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    _lacks: ClassVar[Mapping[str, str]] = {
        "bfloat16_inference": "oneflow 0.9.0 has no bfloat16 convolution there; use float32",
        "host_memory": "a GPU has memory of its own",
    }

    def _problems(self) -> list[str]:
        problem = self._problem()
        return [] if problem is None else [problem]

    def _problem(self) -> str | None:
        """The first thing that is missing; what comes after cannot be asked for without it."""
        if not oneflow.sysconfig.with_cuda():
            return f"this oneflow {flow.__version__} is built without CUDA"
        try:
            driver = nvml.query()
        except nvml.NvmlError as error:
            return str(error)
        if driver.cuda_version < OLDEST_DRIVER_CUDA:
            return (
                f"the NVIDIA driver supports CUDA {_dotted(driver.cuda_version)} at most; this "
                "oneflow is built with CUDA 11.7 and needs driver 450.80.02 or newer"
            )
        gpus = nvml.visible(driver.gpus)
        if not gpus and driver.gpus:
            return (
                f"{nvml.VISIBLE_VARIABLE} hides all {len(driver.gpus)} NVIDIA GPUs of this machine"
            )
        if not gpus:
            return "the NVIDIA driver finds no GPU"
        unfit = [gpu for gpu in gpus if not _has_code_for(gpu)]
        if not unfit:
            return None
        listed = ", ".join(
            f"GPU {gpu.index} {gpu.name} (compute capability {_dotted(gpu.capability)})"
            for gpu in unfit
        )
        hint = (
            f"; leave only the other GPUs in {nvml.VISIBLE_VARIABLE}"
            if len(unfit) < len(gpus)
            else ""
        )
        return (
            f"oneflow {flow.__version__} has machine code for compute capability "
            f"{_dotted(OLDEST_CAPABILITY)} to {_dotted(NEWEST_CAPABILITY)} (sm_60 to sm_86), not "
            f"for {listed}{hint}"
        )

    def device_count(self) -> int:
        return flow.cuda.device_count()

    def current_device(self) -> int:
        return flow.cuda.current_device()

    def set_device(self, index: int) -> None:
        self.device(index)
        flow.cuda.set_device(index)

    def synchronize(self) -> None:
        flow.cuda.synchronize(self.current_device())

    def properties(self) -> DeviceProperties:
        gpu = self._gpu()
        return DeviceProperties(gpu.name, gpu.total_memory, peak_flops(gpu.name))

    def supported_dtypes(self) -> tuple[flow.dtype, ...]:
        dtypes = (flow.float32, flow.float64, flow.float16)
        if self._gpu().capability >= _BFLOAT16_CAPABILITY:
            return (*dtypes, flow.bfloat16)
        return dtypes

    def _memory_used(self) -> int:
        return int(flow._oneflow_internal.GetCUDAMemoryUsed() * _MIB)

    def _gpu(self) -> nvml.Gpu:
        """The current GPU as the driver describes it."""
        self.activate()
        return nvml.visible(nvml.query().gpus)[self.current_device()]


def attention_reasons() -> list[str]:
    """Why OneFlow's attention operator for inference cannot run on the current GPU; empty where it
    can."""
    if _capability(CudaBackend().current_device()) >= _ATTENTION_CAPABILITY:
        return []
    return [f"needs compute capability {_dotted(_ATTENTION_CAPABILITY)} or newer"]


# Attention asks at each call, and the driver takes its time to answer.
@functools.cache
def _capability(current_device: int) -> tuple[int, int]:
    return CudaBackend()._gpu().capability


def _has_code_for(gpu: nvml.Gpu) -> bool:
    return OLDEST_CAPABILITY <= gpu.capability <= NEWEST_CAPABILITY


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
