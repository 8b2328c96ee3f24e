"""The CUDA backend, as far as a machine without a GPU can: the only fake is NVIDIA's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oneflow_accel.backends import FEATURES, nvml
from oneflow_accel.backends.cuda import TF32_VARIABLE, CudaBackend, peak_flops
from oneflow_accel.errors import DeviceUnavailableError

import oneflow as flow
import pytest

GIB = 2**30


@dataclass
class FakeGpu:
    name: str
    capability: tuple[int, int]
    memory: int = 16 * GIB


V100 = FakeGpu("Tesla V100-SXM2-16GB", (7, 0))
A100 = FakeGpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
H200 = FakeGpu("NVIDIA H200", (9, 0), 141 * GIB)
M60 = FakeGpu("Tesla M60", (5, 2), 8 * GIB)


class FakeNvml:
    """Answers as libnvidia-ml.so.1 does: fills in what the pointers point to, returns a code."""

    def __init__(self, gpus: list[FakeGpu], cuda_version: int = 11070) -> None:
        self.gpus = gpus
        self.cuda_version = cuda_version
        self.initialized = 0
        self.failing: str | None = None

    def __getattr__(self, function: str) -> Callable[..., int]:
        method = getattr(self, f"_{function}", None)
        if method is None:
            raise AttributeError(f"undefined symbol: {function}")

        def call(*args: Any) -> int:
            if function == self.failing:
                return 15
            assert function == "nvmlInit_v2" or self.initialized, f"{function} before nvmlInit"
            method(*args)
            return 0

        return call

    def _nvmlInit_v2(self) -> None:  # noqa: N802
        self.initialized += 1

    def _nvmlShutdown(self) -> None:  # noqa: N802
        self.initialized -= 1

    def _nvmlSystemGetCudaDriverVersion(self, version: Any) -> None:  # noqa: N802
        version._obj.value = self.cuda_version

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(self.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:  # noqa: N802
        handle._obj.value = index.value + 1000

    def _nvmlDeviceGetCudaComputeCapability(  # noqa: N802
        self, handle: Any, major: Any, minor: Any
    ) -> None:
        major._obj.value, minor._obj.value = self.gpus[handle.value - 1000].capability

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:  # noqa: N802
        memory._obj.total = self.gpus[handle.value - 1000].memory

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> None:  # noqa: N802
        buffer.value = self.gpus[handle.value - 1000].name.encode()[: length.value]

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> None:  # noqa: N802
        buffer.value = f"GPU-{handle.value:08x}"[: length.value].encode()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nvml.VISIBLE_VARIABLE, raising=False)
    monkeypatch.delenv(TF32_VARIABLE, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, cuda_version: int = 11070) -> FakeNvml:
    library = FakeNvml(list(gpus), cuda_version)
    monkeypatch.setattr(nvml, "load_library", lambda: library)
    return library


def test_no_driver_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml-absent.so.1")
    reason = CudaBackend().unavailable_reason()
    assert reason is not None
    assert reason.startswith("no NVIDIA driver on this machine (libnvidia-ml-absent.so.1")


@pytest.mark.parametrize("gpu", [V100, A100, FakeGpu("P100", (6, 0)), FakeGpu("3090", (8, 6))])
def test_gpus_of_the_wheel_are_available_with_fake_nvml(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:
    library = install(monkeypatch, gpu)
    assert CudaBackend().unavailable_reason() is None
    assert library.initialized == 0, "nvmlInit without nvmlShutdown"


@pytest.mark.parametrize(
    ("gpus", "cuda_version", "parts"),
    [
        ([H200], 11070, ["GPU 0 NVIDIA H200 (compute capability 9.0)", "sm_60 to sm_86"]),
        ([M60], 11070, ["GPU 0 Tesla M60 (compute capability 5.2)"]),
        ([V100], 10020, ["supports CUDA 10.2 at most", "450.80.02 or newer"]),
        ([], 11070, ["the NVIDIA driver finds no GPU"]),
    ],
    ids=["too new", "too old", "old driver", "none"],
)
def test_what_does_not_fit_is_named_with_fake_nvml(
    monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu], cuda_version: int, parts: list[str]
) -> None:
    install(monkeypatch, *gpus, cuda_version=cuda_version)
    with pytest.raises(DeviceUnavailableError) as caught:
        CudaBackend().activate()
    for part in parts:
        assert part in str(caught.value)


def test_one_unfit_gpu_of_two_can_be_hidden_with_fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, H200, A100)
    reason = CudaBackend().unavailable_reason()
    assert reason is not None
    assert "GPU 0 NVIDIA H200" in reason
    assert "A100" not in reason
    assert "leave only the other GPUs in CUDA_VISIBLE_DEVICES" in reason
    monkeypatch.setenv(nvml.VISIBLE_VARIABLE, "1")
    assert CudaBackend().unavailable_reason() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,1", [0, 1]),
        ("1, 0", [1, 0]),
        ("GPU-000003e9", [1]),
        ("GPU-000003", []),  # fits both
        ("0,7,1", [0]),
        ("-1", []),
        ("", []),
    ],
)
def test_visible_devices_as_cuda_reads_it_with_fake_nvml(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: list[int]
) -> None:
    install(monkeypatch, V100, A100)
    monkeypatch.setenv(nvml.VISIBLE_VARIABLE, text)
    assert [gpu.index for gpu in nvml.visible(nvml.query().gpus)] == expected
    hidden = CudaBackend().unavailable_reason()
    assert (hidden is None) == bool(expected)
    assert expected or hidden == "CUDA_VISIBLE_DEVICES hides all 2 NVIDIA GPUs of this machine"


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetName"])
def test_driver_error_is_named_with_fake_nvml(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    library = install(monkeypatch, V100)
    library.failing = function
    reason = CudaBackend().unavailable_reason()
    assert reason == f"the NVIDIA driver answers {function} with NVML error 15"
    assert library.initialized == 0


def test_driver_without_a_function_is_named_with_fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "load_library", lambda: ctypes.CDLL(None))
    reason = str(CudaBackend().unavailable_reason())
    assert "too old or incomplete" in reason
    assert "nvmlInit_v2" in reason


def test_bfloat16_needs_ampere_with_fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, V100)
    assert flow.bfloat16 not in CudaBackend().supported_dtypes()
    install(monkeypatch, A100)
    assert flow.bfloat16 in CudaBackend().supported_dtypes()
    properties = CudaBackend().properties()
    assert (properties.name, properties.total_memory) == (A100.name, 80 * GIB)
    assert properties.peak_flops["float16"] == 312e12


def test_supports_what_it_says() -> None:
    lacking = [feature for feature in FEATURES if not CudaBackend().supports(feature)]
    assert sorted(lacking) == ["bfloat16_inference", "bfloat16_products", "host_memory"]


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("Tesla V100-SXM2-32GB", "float16", 125.0),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("Tesla P100-PCIE-16GB", "float32", 9.3),
        ("NVIDIA A100 80GB PCIe", "float32", 156.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA A40", "float32", 74.8),
        ("NVIDIA GeForce RTX 3090", "float16", 71.0),
        ("Tesla T4", "float16", 65.0),
        # Other cards than those above, and not to be taken for them.
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA A100X", "float16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "float16", None),
        ("NVIDIA H200", "float16", None),
    ],
)
def test_peak_table(name: str, dtype: str, teraflops: float | None) -> None:
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(name)[dtype] == expected


@pytest.mark.parametrize(("value", "teraflops"), [("0", 19.5), ("off", 19.5), ("true", 156.0)])
def test_peak_of_float32_follows_the_tf32_switch(
    monkeypatch: pytest.MonkeyPatch, value: str, teraflops: float
) -> None:
    monkeypatch.setenv(TF32_VARIABLE, value)
    assert peak_flops("NVIDIA A100-SXM4-40GB")["float32"] == pytest.approx(teraflops * 1e12)
