"""Operations that have several implementations, and which one runs where.

An operation is one entry: a reference made of plain OneFlow operators, and implementations, each
for one device and some dtypes, with a function that says why it does not support given arguments.
The first implementation declared that fits is chosen, then one for any device, which is made of
plain operators as well but takes less memory, else the reference. Models call the entry:

    swish = register_operation(
        "swish",
        reference=lambda x: x * flow.sigmoid(x),
        doc="x sigmoid(x)",
        lacks={CpuBackend.name: "no kernel yet", MluBackend.name: "oneflow_mlu has none"},
    )

    @implementation("swish", backend=CudaBackend.name, dtypes=(flow.float16,), never_run=True)
    def fused_swish(x): ...

    swish(x)

ONEFLOW_ACCEL_DISABLE=swish,fused_rope, or `with disabled("swish"):`, switches off all
implementations of an operation, or the one of that name: what it is worth shows without it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from oneflow_accel import settings
from oneflow_accel.backends import kernels_of
from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.errors import UserError, nearest
from oneflow_accel.kernels.operators import Operator

import oneflow as flow

logger = logging.getLogger("oneflow_accel")

Function = Callable[..., Any]
Reasons = Callable[..., list[str]]
# The backend of an implementation made of plain operators, for where a device has none of its own.
ANY_DEVICE = "any device"
FLOATS = (flow.float32, flow.float64, flow.float16, flow.bfloat16)


class FallbackError(UserError):
    """Strict mode: an operation would have run on its reference; the text holds every reason."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation: on one backend, in some dtypes.

    `missing_reasons` returns why this process cannot run it, whatever the arguments;
    `not_supported_reasons` takes the arguments and returns why it cannot compute them. `never_run`
    says that it was written without such a device at hand.
    """

    name: str
    function: Function
    backend: str
    dtypes: tuple[flow.dtype, ...]
    missing_reasons: Callable[[], list[str]]
    not_supported_reasons: Reasons
    never_run: bool = False

    def describe(self) -> str:
        """Name, device and dtypes, and whether it has ever run there."""
        dtypes = ", ".join(map(str, self.dtypes))
        unproven = "; never run on such a device" if self.never_run else ""
        return f"{self.name} ({self.backend}, {dtypes}{unproven})"

    def reasons_against(self, backend: str, args: tuple[Any, ...], kwargs: Any) -> list[str]:
        """Everything that keeps this implementation from computing these arguments."""
        if self.backend not in (backend, ANY_DEVICE):
            return [f"is for {self.backend}, the tensors are on {backend}"]
        missing = self.missing_reasons()
        if missing:
            return missing
        wrong = {
            str(tensor.dtype)
            for tensor in _tensors(args, kwargs)
            if tensor.is_floating_point() and tensor.dtype not in self.dtypes
        }
        if wrong:
            has = ", ".join(map(str, self.dtypes))
            return [f"has {has}, not {', '.join(sorted(wrong))}"]
        return self.not_supported_reasons(*args, **kwargs)


@dataclass
class Operation:
    """An entry of the registry; calling it computes the operation. `lacks` says by device why it
    has no implementation there and what its reference does instead."""

    name: str
    reference: Function
    doc: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    implementations: list[Implementation] = field(default_factory=list)
    _warned: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the first implementation that fits, else with the reference; FallbackError
        if none of this device fits although it has one, and strict mode is on."""
        return self.choose(*args, **kwargs)(*args, **kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Function:
        """What computes these arguments, for callers that go on with others of the same device,
        dtypes and numbers of dimensions: choosing takes longer than starting a small operator."""
        backend = _backend_of(_tensors(args, kwargs))
        against: list[str] = []
        off = _disabled()
        if self.name in off:
            return self.reference
        for candidate in self.implementations:
            if candidate.name in off:
                continue
            reasons = candidate.reasons_against(backend, args, kwargs)
            if not reasons:
                if against and candidate.backend == ANY_DEVICE:
                    self._fall_back(backend, candidate.name, against)
                return candidate.function
            if candidate.backend == backend:
                against.append(f"{candidate.name}: {'; '.join(reasons)}")
        if against:
            self._fall_back(backend, "its reference", against)
        return self.reference

    def _fall_back(self, backend: str, instead: str, against: list[str]) -> None:
        text = f"{self.name} on {backend} runs on {instead}: {' | '.join(against)}"
        if settings.STRICT.get():
            raise FallbackError(f"{text} ({settings.STRICT.name}=1 makes this an error)")
        if not self._warned:
            self._warned = True
            logger.warning("%s (said once per operation)", text)


_operations: dict[str, Operation] = {}
# Modules beside this one that register operations when they are imported.
_MODULES = (
    *("attention", "convolution", "generation", "linear", "loss", "monarch", "optimizer"),
    "transformer",
)


def register_operation(
    name: str, *, reference: Function, doc: str, lacks: Mapping[str, str] | None = None
) -> Operation:
    """Add an operation: `reference` computes it with plain OneFlow operators, on every device and
    dtype; `doc` says in a sentence what it computes; `lacks` by device why it has no implementation
    there."""
    if name in _operations:
        raise ValueError(f"operation '{name}' is registered twice")
    _operations[name] = Operation(name, reference, doc, dict(lacks or {}))
    return _operations[name]


def implementation(
    operation: str,
    *,
    backend: str = ANY_DEVICE,
    dtypes: tuple[flow.dtype, ...] = FLOATS,
    missing_reasons: Callable[[], list[str]] = list,
    not_supported_reasons: Reasons = lambda *args, **kwargs: [],
    never_run: bool = False,
) -> Callable[[Function], Function]:
    """Decorator: the function computes `operation` on `backend` in these floating-point dtypes;
    declare the fastest first. The reasons are those of `Implementation`."""
    entry = _entry(operation)
    limits = (backend, dtypes, missing_reasons, not_supported_reasons, never_run)

    def add(function: Function) -> Function:
        entry.implementations.append(Implementation(function.__name__, function, *limits))
        # Those of devices come first, whoever declares them later.
        entry.implementations.sort(key=lambda each: each.backend == ANY_DEVICE)
        return function

    return add


def cpu_implementation(
    operation: str,
    operator: Operator,
    *,
    dtypes: tuple[flow.dtype, ...] = (flow.float32, flow.bfloat16),
    not_supported_reasons: Reasons = lambda *args, **kwargs: [],
) -> Callable[[Function], Function]:
    """Decorator: `implementation` on CPUs, by an operator of the plug-in."""
    return implementation(
        operation,
        backend=CpuBackend.name,
        dtypes=dtypes,
        missing_reasons=operator.missing_reasons,
        not_supported_reasons=not_supported_reasons,
    )


def on_cards(text: str) -> dict[str, str]:
    """`lacks` of an operation that all cards lack for one reason."""
    return dict.fromkeys((CudaBackend.name, MluBackend.name), text)


def operations() -> dict[str, Operation]:
    """All operations by name, those of this package whether a model has used them or not."""
    for module in _MODULES:
        importlib.import_module(f"oneflow_accel.kernels.{module}")
    return dict(_operations)


def explain(operation: str, backend: str, *args: Any, **kwargs: Any) -> str:
    """What would compute an operation on a backend (which need not be there), why nothing better,
    and what there is for other devices. Without arguments, dtypes and shapes are left out of
    account."""
    entry = _entry(operation)
    lines = [f"{entry.name}: {entry.doc}"]
    chosen = False
    for candidate in entry.implementations:
        reasons: list[str] = []
        if {operation, candidate.name} & _disabled():
            reasons = ["is switched off"]
        elif candidate.backend not in (backend, ANY_DEVICE):
            reasons = [f"is for {candidate.backend}"]
        elif args or kwargs:
            reasons = candidate.reasons_against(backend, args, kwargs)
        else:
            reasons = candidate.missing_reasons()
        mark = "no" if reasons else "not needed" if chosen else "CHOSEN"
        chosen = chosen or not reasons
        why = f": {'; '.join(reasons)}" if reasons else ""
        lines.append(f"  {mark}: {candidate.describe()}{why}")
    lines += [f"  none for {device}: {reason}" for device, reason in entry.lacks.items()]
    lines.append(f"  {'not needed' if chosen else 'CHOSEN'}: reference (any device, any dtype)")
    return "\n".join(lines)


# Beside those of the environment.
_off: set[str] = set()


@contextlib.contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Inside, these operations, or implementations, are switched off for the whole process;
    UserError for an unknown name."""
    added = known_names(names, "disabled") - _off
    _off.update(added)
    try:
        yield
    finally:
        _off.difference_update(added)


def _disabled() -> set[str]:
    text = settings.DISABLE.get()
    return _off | _parsed(text) if text else _off


@lru_cache(maxsize=8)
def _parsed(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",")]
    return known_names([name for name in names if name], f"{settings.DISABLE.name}={text}")


def known_names(names: Sequence[str], where: str) -> frozenset[str]:
    """The names; UserError, which begins with `where`, for one that is not an operation's and no
    implementation's."""
    known = set(operations())
    for operation in _operations.values():
        known.update(each.name for each in operation.implementations)
    for name in names:
        if name not in known:
            near = nearest(name, known)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UserError(f"{where}: no operation or implementation is called '{name}'.{hint}")
    return frozenset(names)


def _entry(name: str) -> Operation:
    if name not in _operations:
        near = nearest(name, _operations)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        known = ", ".join(sorted(_operations)) or "none"
        raise UserError(f"no operation is called '{name}'; there are: {known}.{hint}")
    return _operations[name]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[flow.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, flow.Tensor):
            yield value


def _backend_of(tensors: Iterator[flow.Tensor]) -> str:
    """The device whose implementations fit the first tensor's; a global tensor has a placement in
    place of a device."""
    for tensor in tensors:
        return kernels_of(tensor.placement.type if tensor.is_global else tensor.device.type)
    raise TypeError("an operation needs at least one tensor among its arguments")
