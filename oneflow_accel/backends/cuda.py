"""NVIDIA GPUs, from Pascal (sm_60) to Ampere (sm_86): what the oneflow 0.9.0 wheel has code for.

Written from the sources of oneflow 0.9.0 and tested with a fake driver library; it has not run on
a GPU.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from oneflow_accel.backends import nvml
from oneflow_accel.backends.base import Backend, DeviceProperties

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
TF32_VARIABLE = "ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION"


# Peak speed of NVIDIA GPUs from sm_60 to sm_86: dense TFLOP/s, NVIDIA's figures.
#
# Sources, by short name:
#   P100  "NVIDIA Tesla P100" data sheet (PCIe: 2016; SXM2: "Tesla P100 NVLink")
#   GTX   CUDA cores x 2 x boost clock of "GeForce GTX 1080 Ti": 3584 x 2 x 1.582 GHz
#   V100  "NVIDIA V100 Tensor Core GPU" data sheet, January 2020 (PCIe, SXM2, V100S)
#   T4    "NVIDIA T4 Tensor Core GPU" data sheet
#   TU102 "NVIDIA Turing GPU Architecture" white paper, tables 1 and 4 (reference boards)
#   A100  "NVIDIA A100 Tensor Core GPU" data sheet
#   A30, A10, A40   the data sheet of that name
#   GA102 "NVIDIA Ampere GA102 GPU Architecture" white paper v2, appendices A and C
#
# float16 and bfloat16 are tensor-core figures with float32 accumulation, which is what OneFlow's
# matmul and convolution ask for; on GeForce cards that is half of the figure for float16
# accumulation.
@dataclass(frozen=True)
class _Peak:
    source: str
    float64: float | None
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None


_PEAK_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Patterns for the whole name, without "NVIDIA", "Tesla" and "GeForce".
_PEAKS: tuple[tuple[str, _Peak], ...] = (
    (r"P100-SXM2.*", _Peak("P100", 5.3, 10.6, None, 21.2, None)),
    (r"P100-PCIE.*", _Peak("P100", 4.7, 9.3, None, 18.7, None)),
    # sm_61 runs float16 at 1/64 of the speed of float32 (CUDA programming guide, "Arithmetic
    # Instructions").
    (r"GTX 1080 Ti", _Peak("GTX", 0.354, 11.3, None, 0.177, None)),
    (r"V100-SXM[23].*", _Peak("V100", 7.8, 15.7, None, 125.0, None)),
    (r"V100-PCIE.*", _Peak("V100", 7.0, 14.0, None, 112.0, None)),
    (r"V100S-PCIE.*", _Peak("V100", 8.2, 16.4, None, 130.0, None)),
    (r"T4", _Peak("T4", None, 8.1, None, 65.0, None)),
    (r"RTX 2080 Ti", _Peak("TU102", None, 13.4, None, 53.8, None)),
    (r"A100[- ].*", _Peak("A100", 19.5, 19.5, 156.0, 312.0, 312.0)),
    (r"A30", _Peak("A30", 10.3, 10.3, 82.0, 165.0, 165.0)),
    (r"A10", _Peak("A10", None, 31.2, 62.5, 125.0, 125.0)),
    (r"A40", _Peak("A40", None, 37.4, 74.8, 149.7, 149.7)),
    (r"RTX A6000", _Peak("GA102", None, 38.7, 77.4, 154.8, 154.8)),
    (r"RTX 3090", _Peak("GA102", None, 35.6, 35.6, 71.0, 71.0)),
)


class CudaBackend(Backend):
    """NVIDIA GPUs through CUDA.

    `memory_allocated()` counts what is in use on the current GPU, by every process and with
    OneFlow's cached blocks: oneflow 0.9.0 has no counter of tensors, nor of a peak.
    """

    name: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    _lacks: ClassVar[Mapping[str, str]] = {
        "bfloat16_products": "oneflow 0.9.0 multiplies float32 there in TF32 or float32 only",
        "bfloat16_inference": "oneflow 0.9.0 has no bfloat16 convolution there; use float32",
        "host_memory": "a GPU has memory of its own",
    }

    def _problems(self) -> list[str]:
        # The first thing that is missing; what comes after cannot be asked for without it.
        if not oneflow.sysconfig.with_cuda():
            return [f"this oneflow {flow.__version__} is built without CUDA"]
        try:
            driver = nvml.query()
        except nvml.NvmlError as error:
            return [str(error)]
        if driver.cuda_version < OLDEST_DRIVER_CUDA:
            return [
                f"the NVIDIA driver supports CUDA {_dotted(driver.cuda_version)} at most; this "
                "oneflow is built with CUDA 11.7 and needs driver 450.80.02 or newer"
            ]
        gpus = nvml.visible(driver.gpus)
        if not gpus:
            hides = (
                f"{nvml.VISIBLE_VARIABLE} hides all {len(driver.gpus)} NVIDIA GPUs of this machine"
            )
            return [hides if driver.gpus else "the NVIDIA driver finds no GPU"]
        has_code = [OLDEST_CAPABILITY <= gpu.capability <= NEWEST_CAPABILITY for gpu in gpus]
        if all(has_code):
            return []
        listed = ", ".join(
            f"GPU {gpu.index} {gpu.name} (compute capability {_dotted(gpu.capability)})"
            for gpu, has in zip(gpus, has_code, strict=True)
            if not has
        )
        hint = f"; leave only the other GPUs in {nvml.VISIBLE_VARIABLE}" if any(has_code) else ""
        return [
            f"oneflow {flow.__version__} has machine code for compute capability "
            f"{_dotted(OLDEST_CAPABILITY)} to {_dotted(NEWEST_CAPABILITY)} (sm_60 to sm_86), not "
            f"for {listed}{hint}"
        ]

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


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def peak_flops(gpu_name: str) -> dict[str, float | None]:
    """Peak FLOP/s by dtype name for a GPU as NVML names it; None for what is not known.

    "float32" is TF32's figure where the GPU has it, because OneFlow runs a float32 matmul in TF32
    unless ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION switches that off.
    """
    short = re.sub(r"\b(NVIDIA|Tesla|GeForce)\b", "", gpu_name).strip()
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, short):
            as_run = replace(peak, float32=peak.tf32) if peak.tf32 and _tf32_enabled() else peak
            figures = {dtype: getattr(as_run, dtype) for dtype in _PEAK_DTYPES}
            return {key: None if value is None else value * 1e12 for key, value in figures.items()}
    return dict.fromkeys(_PEAK_DTYPES)


def _tf32_enabled() -> bool:
    # The spellings that OneFlow takes for true; everything else is false to it.
    return os.environ.get(TF32_VARIABLE, "true").lower() in ("1", "true", "yes", "on", "y")
