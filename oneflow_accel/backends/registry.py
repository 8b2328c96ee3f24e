"""Which devices there are, and which one this process uses.

Built-in backends and those of other packages (entry-point group `oneflow_accel.backends`; the
entry's name is the device's, its value a subclass of `Backend`) are chosen by the same rule: what
the caller asks for, else ONEFLOW_ACCEL_DEVICE, else the first of PROBE_ORDER that is usable.
Another package's device, and the emulated one, are used only if they are asked for.
"""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass

from oneflow_accel import settings
from oneflow_accel.backends import profile
from oneflow_accel.backends.base import Backend
from oneflow_accel.backends.cpu import CpuBackend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.emulated import EmulatedBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.errors import DeviceUnavailableError, nearest

logger = logging.getLogger("oneflow_accel")

ENTRY_POINT_GROUP = "oneflow_accel.backends"
# In probe order: special hardware first. A machine with none of it has a CPU.
_PROBED: tuple[type[Backend], ...] = (MluBackend, CudaBackend, CpuBackend)
PROBE_ORDER = tuple(backend.name for backend in _PROBED)
_BUILT_IN: tuple[type[Backend], ...] = (*_PROBED, EmulatedBackend)
_KERNELS = {backend.name: backend.kernels or backend.name for backend in _BUILT_IN}


@dataclass(frozen=True)
class Candidate:
    """A name that can be asked for, the package that offers it, the backend (None where it cannot
    even be made), and why it is not usable (None where it is)."""

    name: str
    source: str
    backend: Backend | None
    reason: str | None


@dataclass(frozen=True)
class Selection:
    """A usable backend and why it is the one."""

    backend: Backend
    why: str


_backends: dict[str, Backend] = {}
_current: Backend | None = None


def candidates() -> dict[str, Candidate]:
    """Every device by name, built-in ones first in probe order, each probed now."""
    return {name: _candidate(name, offers) for name, offers in _offers().items()}


def available_backends() -> dict[str, str | None]:
    """Name of every device -> None where it is usable, else the reason why not."""
    return {name: candidate.reason for name, candidate in candidates().items()}


def resolve(name: str | None = None) -> Selection:
    """Find the device by the rule above, and change nothing; DeviceUnavailableError if the one that
    was asked for does not exist or is not usable."""
    variable = settings.DEVICE.get()
    if name is not None:
        return Selection(_asked_for(name, "asked for"), "asked for")
    if variable:
        origin = f"{settings.DEVICE.name}={variable}"
        return Selection(_asked_for(variable, origin), origin)
    offers = _offers()
    refused: dict[str, str | None] = {}
    for probed in PROBE_ORDER:
        candidate = _candidate(probed, offers[probed])
        if candidate.backend is not None and candidate.reason is None:
            why = f"the first usable one of {', '.join(PROBE_ORDER)}"
            if refused:
                why += f"; `python -m oneflow_accel` says why not {' and '.join(refused)}"
            return Selection(candidate.backend, why)
        refused[probed] = candidate.reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise DeviceUnavailableError(f"no device is usable: {reasons}")


def select_device(name: str | None = None) -> Backend:
    """Choose the device of this process ("cpu", "cuda", "mlu" or another package's; None: by the
    rule above), make it ready, and log which and why.

    Raises:
        DeviceUnavailableError: the device that was asked for does not exist or is not usable.
    """
    global _current
    selection = resolve(name)
    selection.backend.activate()
    _current = selection.backend
    logger.info("device %s (%s)", selection.backend.name, selection.why)
    return _current


def delegate_of(name: str) -> str:
    """The device whose kernels run for a device, and by whose name OneFlow's autocast takes it:
    itself where it has kernels of its own."""
    return _KERNELS.get(name, name)


def kernels_of(name: str) -> str:
    """The device whose implementations of operations run on a device."""
    other = profile.active()
    kernels = delegate_of(name)
    return other.device.name if other is not None and kernels == CpuBackend.name else kernels


def current_backend() -> Backend:
    """The device of this process; the first call selects it if nothing has."""
    return _current if _current is not None else select_device()


def _offers() -> dict[str, list[type[Backend] | importlib.metadata.EntryPoint]]:
    """Everything that is offered under each name; nothing is imported yet."""
    offers: dict[str, list[type[Backend] | importlib.metadata.EntryPoint]] = {
        backend.name: [backend] for backend in _BUILT_IN
    }
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        offers.setdefault(entry.name, []).append(entry)
    return offers


def _asked_for(name: str, origin: str) -> Backend:
    offers = _offers()
    if name not in offers:
        close = nearest(name, offers)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise DeviceUnavailableError(
            f"no device is called '{name}' ({origin}); devices are: {', '.join(offers)}.{hint}"
        )
    candidate = _candidate(name, offers[name])
    if candidate.backend is None or candidate.reason is not None:
        raise DeviceUnavailableError(
            f"device '{name}' ({origin}) cannot be used: {candidate.reason}"
        )
    return candidate.backend


def _candidate(name: str, offers: list[type[Backend] | importlib.metadata.EntryPoint]) -> Candidate:
    sources = [_source(offer) for offer in offers]
    if len(offers) > 1:
        reason = f"{' and '.join(sources)} both offer it; uninstall one"
        return Candidate(name, ", ".join(sources), None, reason)
    # Code of another package may raise anything; whatever it is becomes this device's reason, so
    # that the other devices stay usable.
    try:
        backend = _make(name, offers[0])
        reason_why_not = backend.unavailable_reason()
    except Exception as error:
        return Candidate(name, sources[0], None, f"{type(error).__name__}: {error}")
    return Candidate(name, sources[0], backend, reason_why_not)


def _make(name: str, offer: type[Backend] | importlib.metadata.EntryPoint) -> Backend:
    if name not in _backends:
        kind = offer.load() if isinstance(offer, importlib.metadata.EntryPoint) else offer
        if not (isinstance(kind, type) and issubclass(kind, Backend)):
            raise TypeError(f"{kind!r} is not a subclass of {Backend.__module__}.Backend")
        if getattr(kind, "name", None) != name:
            raise ValueError(f"{kind.__name__}.name is not '{name}', the name of its entry point")
        _backends[name] = kind()
        _KERNELS[name] = kind.kernels or name
    return _backends[name]


def _source(offer: type[Backend] | importlib.metadata.EntryPoint) -> str:
    if not isinstance(offer, importlib.metadata.EntryPoint):
        return "oneflow-accel"
    if offer.dist is None:
        return offer.value
    return f"{offer.dist.metadata['Name']} {offer.dist.version}"
