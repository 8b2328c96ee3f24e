"""What another device lacks, taken away here: a program meets on the emulated device what it would
meet on that one, and on the CPU the same code runs, to compare with.

`ONEFLOW_ACCEL_EMULATE=mlu` reads profiles/mlu.json, and a path a file of the same form. It names
the device whose features these are, the types that the device computes in, the operators that have
kernels there (by the types of their floating-point tensors, or of the first where there are none),
and where all this is from. The emulated device has only these operators; the CPU keeps its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from oneflow_accel import settings
from oneflow_accel.backends.base import Backend
from oneflow_accel.backends.cuda import CudaBackend
from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.errors import UserError, did_you_mean

FOLDER = Path(__file__).with_name("profiles")
_DEVICES: dict[str, type[Backend]] = {kind.name: kind for kind in (MluBackend, CudaBackend)}
_TOUCH = "eager_nccl_touch"
_KEYS = {"device": str, "sources": list, "dtypes": list, "operators": dict}


@dataclass(frozen=True)
class Profile:
    """`name` is that of its file, `operators` those that have kernels, with the types' names."""

    name: str
    device: Backend
    dtypes: tuple[str, ...]
    operators: dict[str, tuple[str, ...]]

    def why_not(self, feature: str) -> str | None:
        """Why the device lacks a feature, or None where it has it."""
        # A backend finds this out by a launch on a device that is there.
        if feature == "ddp_stream_touch":
            return None if _TOUCH in self.operators else f"{_TOUCH} has no kernel there"
        reason = self.device._why_not(feature)
        return None if reason is None else f"as on {self.device.name}: {reason}"


@lru_cache(maxsize=1)
def active() -> Profile | None:
    """The profile that the environment asks for, kept; UserError where it is none."""
    text = settings.EMULATE.get()
    return None if text is None else _read(text)


def _read(text: str) -> Profile:
    path = FOLDER / f"{text}.json" if "/" not in text and "." not in text else Path(text)
    where = f"{settings.EMULATE.name}={text}"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        names = sorted(each.stem for each in FOLDER.glob("*.json"))
        raise UserError(
            f"{where} is neither a profile nor a file of one ({error.strerror}); profiles are "
            f"{', '.join(names)}; {did_you_mean(text, names)}".removesuffix("; ")
        ) from error
    except ValueError as error:
        raise UserError(f"{where}: {path} is not JSON: {error}") from error
    return _checked(found, where, path)


def _checked(found: Any, where: str, path: Path) -> Profile:
    wrong = [
        f"'{key}' is not a {kind.__name__}"
        for key, kind in _KEYS.items()
        if not isinstance(found, dict) or not isinstance(found.get(key), kind)
    ]
    if not wrong and found["device"] not in _DEVICES:
        wrong.append(f"'device' is none of {', '.join(_DEVICES)}")
    if not wrong:
        known = set(found["dtypes"])
        unknown = {each for types in found["operators"] for each in types.split()} - known
        wrong += [f"'operators' has {each}, which 'dtypes' has not" for each in sorted(unknown)]
    if wrong:
        raise UserError(f"{where}: {path}: {'; '.join(wrong)}")
    operators = {
        name: tuple(types.split()) for types, names in found["operators"].items() for name in names
    }
    device = _DEVICES[found["device"]]()
    return Profile(path.stem, device, tuple(found["dtypes"]), operators)
