"""Cambricon MLU cards, through the vendor's plug-in `oneflow_mlu`, or a oneflow that was built with
the cards' kernels in its own tree (own builds of 0.9.1 of March to May 2023).

Written from the public sources of the plug-in (0.0.1), of those builds and of oneflow 1.0.0; it has
not run on a card.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from oneflow_accel.backends.base import Backend, DeviceProperties
from oneflow_accel.errors import DeviceUnavailableError

import oneflow as flow

VENDOR_PACKAGE = "oneflow_mlu"
VENDOR_LIBRARY = "libcnnl.so"
LOADED_FILES = "/proc/self/maps"
VISIBLE_VARIABLE = "MLU_VISIBLE_DEVICES"
# Both made by Cambricon's kernel driver: one node and one information file per card.
DEVICE_NODES = "/dev/cambricon_dev[0-9]*"
INFORMATION_FILES = "/proc/driver/cambricon/mlus/*/information"

# FLOP/s by card name. MLU370-X8: Cambricon's announcement of 21 March 2022 (float16 and bfloat16
# 96 TFLOP/s); figures of 24 and 32 TFLOP/s are in circulation for its float32, so that is unknown.
_PEAK_FLOPS: dict[str, dict[str, float | None]] = {
    "MLU370-X8": {"float32": None, "float16": 96e12, "bfloat16": 96e12}
}
_UNKNOWN_PEAK: dict[str, float | None] = {"float32": None, "float16": None, "bfloat16": None}


class MluBackend(Backend):
    """Cambricon MLU cards."""

    name: ClassVar[str] = "mlu"
    collective_backend: ClassVar[str] = "cncl"
    _lacks: ClassVar[Mapping[str, str]] = {
        "amp": "oneflow's autocast and its graph pass know no Cambricon card; train in float32",
        "bfloat16_training": "oneflow's autocast knows no Cambricon card; train in float32",
        "bfloat16_products": "oneflow_mlu decides how a card multiplies float32",
        "bfloat16_inference": "oneflow_mlu has no bfloat16 kernels; use float32",
        "bfloat16_collectives": "oneflow_mlu has no such type for its collectives; use float32",
        "graph_adamw": "adam_bias_correction_factor has no kernel there; train in eager mode",
        "host_memory": "a card has memory of its own",
        "gradient_clipping": (
            "the vendor's GPT-2 branch trains without it, as scaling by a tensor fails there"
        ),
        "plain_sgd": "sgd_update has no kernel there; use a momentum other than 0",
        "fused_bn_add_relu_train": (
            "normalization_add_relu_grad has no kernel there; use normalization, add and relu"
        ),
        "causal_mask": "tril, triu and masked_fill have no kernels there; build masks on the host",
        "nhwc_max_pool": (
            "oneflow pools channels-last tensors by tf_max_pool_2d, which has no kernel there"
        ),
        "silu": "silu has no kernel there; tanh has one, of which it can be made",
        "uniform_random": "uniform has no kernel there; sample on the host, or use nn.Dropout",
        "fused_transformer": "no fused_* operator has a kernel there; switch fusions off",
        "memory_stats": "oneflow_mlu reports no memory use; look at the vendor's cnmon",
    }

    def _problems(self) -> list[str]:
        missing = []
        cards = _cards()
        if not cards:
            missing.append(f"no Cambricon driver or card on this machine (no {DEVICE_NODES})")
        elif not _visible(cards):
            missing.append(f"{VISIBLE_VARIABLE} hides all {len(cards)} cards of this machine")
        if importlib.util.find_spec(VENDOR_PACKAGE) is None and not _in_oneflow():
            missing.append(
                f"the package {VENDOR_PACKAGE} is not installed (Cambricon's plug-in, built from "
                "the sources of Oneflow-Inc/oneflow-mlu)"
            )
        if not oneflow_knows(self.name):
            missing.append(
                f"this oneflow {flow.__version__} does not know the device type '{self.name}' "
                "(builds from April 2023 on do, such as 1.0.0)"
            )
        return missing

    def activate(self) -> None:
        super().activate()
        if importlib.util.find_spec(VENDOR_PACKAGE) is None:
            return  # What it registers is in oneflow itself.
        try:
            # Registers the card's kernels, memory and collectives in OneFlow.
            importlib.import_module(VENDOR_PACKAGE)
        except (ImportError, OSError) as error:
            raise DeviceUnavailableError(
                f"device '{self.name}' cannot be used: import {VENDOR_PACKAGE} failed: {error}"
            ) from error

    def device_count(self) -> int:
        return len(_visible(_cards()))

    def synchronize(self) -> None:
        super().synchronize()
        # Neither OneFlow nor the plug-in offers a wait for the card's own queue. A copy to the
        # host waits for everything that was queued before it.
        flow.zeros(1, device=self.device()).numpy()

    def manual_seed(self, seed: int) -> None:
        super().manual_seed(seed)
        flow._oneflow_internal.default_generator(self.name).manual_seed(seed)

    def properties(self) -> DeviceProperties:
        names = _card_names()
        index = self.current_device()
        name = names[index] if index < len(names) else "Cambricon MLU"
        return DeviceProperties(name, None, dict(_PEAK_FLOPS.get(name, _UNKNOWN_PEAK)))

    def supported_dtypes(self) -> tuple[flow.dtype, ...]:
        return (flow.float32, flow.float16)

    def _why_not(self, feature: str) -> str | None:
        if feature != "ddp_stream_touch":
            return super()._why_not(feature)
        # Python code can ask OneFlow's registry of kernels by a launch only.
        reason = self.unavailable_reason()
        if reason is not None:
            return f"a launch has to show it, and no card can be used: {reason}"
        self.activate()
        tensor = flow.empty(1, device=self.device())
        try:
            flow._C.stream_touch([tensor])
        except RuntimeError as error:
            said = str(error).partition("\n")[0].strip()
            return f"oneflow {flow.__version__} refuses to launch it there ({said})"
        return None


def _in_oneflow() -> bool:
    """Whether oneflow itself has the cards' kernels: it is then linked to the vendor's library of
    them, and has loaded it."""
    return VENDOR_LIBRARY in Path(LOADED_FILES).read_text(errors="replace")


def oneflow_knows(device_type: str) -> bool:
    """Whether the installed oneflow has a device type of this name."""
    try:
        # With an index: this also runs while oneflow is being imported, when it knows no rank yet.
        flow.device(f"{device_type}:0")
    except RuntimeError:
        return False
    return True


def _cards() -> list[int]:
    """Indices of the cards that the driver has made nodes for."""
    found = (re.search(r"(\d+)$", node) for node in glob.glob(DEVICE_NODES))
    return sorted(int(match.group(1)) for match in found if match)


def _visible(cards: list[int]) -> list[int]:
    """The cards that MLU_VISIBLE_DEVICES leaves, in its order."""
    text = os.environ.get(VISIBLE_VARIABLE)
    if text is None:
        return cards
    wanted = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    return [index for index in wanted if index in cards]


def _card_names() -> list[str]:
    """Model names of the visible cards, as far as the driver tells."""
    names = []
    for path in sorted(glob.glob(INFORMATION_FILES)):
        match = re.search(r"^Device name\s*:\s*(.+?)\s*$", Path(path).read_text(), re.MULTILINE)
        names.append(match.group(1) if match else "Cambricon MLU")
    return [names[index] for index in _visible(_cards()) if index < len(names)]
