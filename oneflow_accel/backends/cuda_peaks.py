"""Peak speed of NVIDIA GPUs from sm_60 to sm_86: dense TFLOP/s, NVIDIA's figures.

Sources, by short name:
  P100  "NVIDIA Tesla P100" data sheet (PCIe: 2016; SXM2: "Tesla P100 NVLink")
  GTX   CUDA cores x 2 x boost clock of "GeForce GTX 1080 Ti": 3584 x 2 x 1.582 GHz
  V100  "NVIDIA V100 Tensor Core GPU" data sheet, January 2020 (PCIe, SXM2, V100S)
  T4    "NVIDIA T4 Tensor Core GPU" data sheet
  TU102 "NVIDIA Turing GPU Architecture" white paper, tables 1 and 4 (reference boards)
  A100  "NVIDIA A100 Tensor Core GPU" data sheet
  A30, A10, A40   the data sheet of that name
  GA102 "NVIDIA Ampere GA102 GPU Architecture" white paper v2, appendices A and C

float16 and bfloat16 are tensor-core figures with float32 accumulation, which is what OneFlow's
matmul and convolution ask for; on GeForce cards that is half of the figure for float16
accumulation.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

TF32_VARIABLE = "ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION"


@dataclass(frozen=True)
class _Peak:
    source: str
    float64: float | None
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None


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


def peak_flops(gpu_name: str) -> dict[str, float | None]:
    """Peak FLOP/s by dtype name for a GPU as NVML names it; None for what is not known.

    "float32" is TF32's figure where the GPU has it, because OneFlow runs a float32 matmul in TF32
    unless ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION switches that off.
    """
    short = re.sub(r"\b(NVIDIA|Tesla|GeForce)\b", "", gpu_name).strip()
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, short):
            float32 = peak.tf32 if peak.tf32 is not None and _tf32_enabled() else peak.float32
            figures = {
                "float64": peak.float64,
                "float32": float32,
                "float16": peak.float16,
                "bfloat16": peak.bfloat16,
            }
            return {key: None if value is None else value * 1e12 for key, value in figures.items()}
    return dict.fromkeys(("float64", "float32", "float16", "bfloat16"))


def _tf32_enabled() -> bool:
    # The spellings that OneFlow takes for true; everything else is false to it.
    return os.environ.get(TF32_VARIABLE, "true").lower() in ("1", "true", "yes", "on", "y")
