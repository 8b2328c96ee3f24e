"""Imports the device layer before any test imports oneflow: it patches oneflow's import."""

from __future__ import annotations

import gc
import os
import signal

# Before libgomp is loaded. A kernel's threads sleep while they have nothing to do, here and in all
# processes that tests start: on shared cores a thread that waits in a loop keeps away the one that
# it waits for. 18 steps of a ResNet18 beside other tests: 43 s and not 154 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Of runs of seconds. Tests of the picture and of the measured peak ask for them.
os.environ.setdefault("FLOW_TRAIN_CURVES", "off")
os.environ.setdefault("FLOW_TRAIN_PEAK", "0.1")

# Hundreds of processes start, and need not compile our modules each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import oneflow_accel  # noqa: F401

import pytest

# A shell's background jobs ignore Ctrl-C, and so would what the tests start and send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Minutes each, so they begin first: at its end a lane would wait for the other one.
LONG = (
    "tests/readmes/test_readmes.py",
    "tests/libai_projects/test_parallel_layouts.py",
    "tests/oneflow_accel/emulated/test_emulated.py",
    "tests/resnet50_imagenet/test_resume.py",
    "tests/resnet50_imagenet/test_runs.py",
    "tests/test_bfloat16_options.py",
    "tests/oneflow_accel/test_import_order.py",
    "tests/libai_projects/train/test_mode_cycle.py",
    "tests/vit_10b/test_vit_training.py",
    "tests/test_separate_disks.py",
)


def pytest_collection_finish() -> None:
    """What stays to the end is no longer looked through for what is not needed any more."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONG)))
