"""The interface of a device, at most 20 public functions named as `torch.accelerator` names them.

One file per device implements it. What differs between devices is asked for by name, with
`Backend.supports("nhwc")`, so that no other code has to compare device names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from oneflow_accel import distributed
from oneflow_accel.errors import DeviceUnavailableError

import oneflow as flow

# What a backend may lack. A feature gets an entry here when some code has to ask for it.
FEATURES = {
    "amp": "mixed precision in float16: autocast, and nn.Graph's enable_amp",
    "bfloat16_training": "mixed precision in bfloat16: autocast",
    "bfloat16_products": "products of float32 matrices in bfloat16, added up in float32",
    "graph": "nn.Graph",
    "graph_adamw": "AdamW inside nn.Graph (its bias correction is an operator there)",
    "plain_sgd": "SGD without momentum",
    "gradient_clipping": "clipping gradients by their norm",
    "nhwc": "convolution, batch normalization and pooling on channels-last tensors, with gradients",
    "nhwc_max_pool": "max pooling of channels-last tensors (else their layout changes around it)",
    "fused_bn_add_relu_train": "batch normalization + add + relu as one operator, with gradient",
    "native_layer_norm": "the layer_norm operator, with gradient (else a chain of small operators)",
    "ddp_stream_touch": "the touch operator that DistributedDataParallel runs after its forward",
    "causal_mask": "tril, triu and masked_fill on the device (else build masks on the host)",
    "silu": "the silu operator, with gradient (else tanh and a product)",
    "uniform_random": "flow.rand on the device",
    "fused_transformer": "OneFlow's fused_* operators, which LiBai's *_fusion options switch on",
    "host_memory": "tensors in host memory: what NumPy measures, the device can do",
    "bfloat16_inference": "convolution, matmul, norms and pooling in bfloat16, without gradients",
    "bfloat16_collectives": "collectives of bfloat16, for global tensors and sums of gradients",
    "memory_stats": "memory_allocated() and max_memory_allocated()",
}


@dataclass(frozen=True)
class Support:
    """The answer to "does this device have ...?": false with a reason, or true."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class DeviceProperties:
    """One device: the vendor's name of the model, bytes of memory (None where unknown), and FLOP/s
    by dtype name ("float32"), dense, for matrix products as OneFlow runs them by default."""

    name: str
    total_memory: int | None
    peak_flops: dict[str, float | None]


class Backend(ABC):
    """A kind of device. Making one touches no driver and imports no vendor package."""

    name: ClassVar[str]
    """The device type as OneFlow spells it, and the name to select it by."""
    collective_backend: ClassVar[str]
    """The library that its collectives run on."""
    kernels: ClassVar[str | None] = None
    """The device whose implementations of operations it runs, where it has none of its own."""
    shares_memory: ClassVar[bool] = False
    """Whether processes of one machine can compute on the same memory."""
    _lacks: ClassVar[Mapping[str, str]] = {}
    """Features that the device never has, with the reason and what to do instead."""

    def __init__(self) -> None:
        self._peak_memory = 0

    def is_available(self) -> bool:
        """Whether this process can compute on the device."""
        return self.unavailable_reason() is None

    def unavailable_reason(self) -> str | None:
        """Everything that is missing, in words a user can act on, or None if nothing is.
        Initializes no driver and imports no vendor package, so it is safe before a fork."""
        return "; ".join(self._problems()) or None

    def prepare(self) -> None:  # noqa: B027 - most devices need nothing
        """Set what OneFlow reads when its first operation begins.

        `import oneflow_accel` calls it for the device that will be chosen unless the program says
        otherwise; it must not ask the device for anything.
        """

    def activate(self) -> None:
        """Get ready to compute; `select_device` calls it once a device is chosen.
        DeviceUnavailableError names what is missing."""
        reason = self.unavailable_reason()
        if reason is not None:
            raise DeviceUnavailableError(f"device '{self.name}' cannot be used: {reason}")
        self.prepare()

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process can see."""

    def current_device(self) -> int:
        """Index of the device that this process computes on: its local rank, as in OneFlow."""
        return int(flow.device(self.name).index)

    def set_device(self, index: int) -> None:
        """Compute on device `index` from now on; ValueError if there is none, or OneFlow ties this
        process to another one."""
        if index != self.current_device():
            raise ValueError(
                f"oneflow runs this process on {self.name}:{self.current_device()} (its local "
                f"rank); it cannot be moved to {self.name}:{index}"
            )

    def take_own_device(self) -> None:
        """In a job of several processes, compute on the device of this one's place on its node."""
        if distributed.world_size() > 1:
            self.set_device(distributed.local_rank() % self.device_count())

    def device(self, index: int | None = None) -> flow.device:
        """The `oneflow.device` of an index, None for the current one; ValueError if there is
        none."""
        if index is None:
            index = self.current_device()
        elif not 0 <= index < self.device_count():
            raise ValueError(f"{self.name}:{index}: there are {self.device_count()} devices")
        return flow.device(self.name, index)

    def synchronize(self) -> None:
        """Wait until everything that this process has given to the device is done; IndexError or
        RuntimeError if a kernel of the CPU plug-in has failed since the last wait."""
        flow._oneflow_internal.eager.Sync()

    def manual_seed(self, seed: int) -> None:
        """Seed the random generators that operators on this device use. `nn.Dropout` of oneflow
        0.9.0 has a generator of its own and ignores this."""
        flow.manual_seed(seed)

    def memory_allocated(self) -> int | None:
        """Bytes in use now, as the file of each backend counts, or None where
        `supports("memory_stats")` says no."""
        if not self.supports("memory_stats"):
            return None
        used = self._memory_used()
        self._peak_memory = max(self._peak_memory, used)
        return used

    def max_memory_allocated(self) -> int | None:
        """Largest number of bytes in use since `reset_peak_memory_stats()`, or None. Where the
        device keeps no peak itself it is the largest value that a call of `memory_allocated()` has
        seen."""
        return None if self.memory_allocated() is None else self._peak_memory

    def reset_peak_memory_stats(self) -> None:
        """Start `max_memory_allocated()` anew."""
        self._peak_memory = 0

    def empty_cache(self) -> None:
        """Give memory that OneFlow's allocators and kernels hold but do not use back to the
        device."""
        flow._oneflow_internal.EmptyCache()

    @abstractmethod
    def properties(self) -> DeviceProperties:
        """Name, memory and peak speed of the current device."""

    @abstractmethod
    def supported_dtypes(self) -> tuple[flow.dtype, ...]:
        """Floating-point dtypes in which matmul, convolution and normalization have kernels."""

    def placement(
        self, ranks: Sequence[int] | Sequence[Sequence[int]] | None = None
    ) -> flow.placement:
        """The `oneflow.placement` of global tensors on these ranks (nested for a 2-D placement);
        None means all processes."""
        if ranks is None:
            return flow.placement.all(self.name)
        return flow.placement(self.name, ranks)

    def supports(self, feature: str) -> Support:
        """Whether the device has a feature, a key of `FEATURES` (else ValueError), and if not,
        why."""
        if feature not in FEATURES:
            raise ValueError(f"unknown feature {feature!r}; features are {', '.join(FEATURES)}")
        reason = self._why_not(feature)
        return Support(ok=reason is None, reason=reason or "")

    @abstractmethod
    def _problems(self) -> list[str]:
        """What keeps the device from being used, one sentence each; see unavailable_reason()."""

    def _why_not(self, feature: str) -> str | None:
        """Why `feature`, a key of FEATURES, is not there, or None if it is."""
        return self._lacks.get(feature)

    def _memory_used(self) -> int:
        """Bytes in use now; only called where the backend supports "memory_stats"."""
        raise NotImplementedError(f"{type(self).__name__} claims memory_stats without counting")
