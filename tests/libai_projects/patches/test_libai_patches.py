"""What each patch against libai mends: the failure without it and those after it, the success with
all. Each failure is in a process of its own, because libai can be imported only once in each."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

from oneflow_accel.patching.series import apply_hunks, join, load_series, patch_root, source_lines

import pytest

from tests.launch import run_process
from tests.libai_projects.patches.partial_series import VARIABLE
from tests.modes import only_all

CASES = "tests.libai_projects.patches.patch_cases"
WITHOUT_PLUGIN = {"ONEFLOW_ACCEL_PLUGIN": "off"}
ONE_THREAD = {"ONEFLOW_ACCEL_THREADS": "1", "OMP_NUM_THREADS": "1"}
# Name of the patch, and what is printed without it.
FAILURES = {
    "0001-no-runtime-make": "SystemExit: 1|No targets|make: ",
    "0002-graph-proxy-api": "has been changed to `enable_zero`",
    "0003-device-type": "device_type",
    "0004-layer-norm-device": "layer_norm_cpu_kernel.cpp",
    "0005-graph-variables": "Error",
    "0006-data-parallel-rank": "AssertionError",
    "0007-dropout": "values were dropped in evaluation",
    "0008-fused-operators": "bool",
    "0009-layouts": "AssertionError: world size",
    "0010-polynomial-schedule": "unexpected keyword argument 'steps'",
    "0011-config-folder": "pkg_resources",
    "0013-ignored-labels": "AssertionError",
    "0014-device-gaps": "AssertionError",
    "0015-yaml-without-code": "the config ran code",
}
# Without the plug-in's kernels; the plug-in mends it as well.
STOCK_KERNELS = {"0004-layer-norm-device"}


def name_of(patch: str) -> str:
    return patch.partition("-")[2].replace("-", "_")


def run(*names: str, before: str = "", **env: str) -> CompletedProcess[str]:
    return run_process(["-m", CASES, *names], timeout=200, env={VARIABLE: before, **env})


def test_each_patch_of_models_and_layers_has_a_case() -> None:
    ours = [p.name.removesuffix(".patch") for p in load_series(patch_root(), "libai", "0.1.1")]
    assert [name for name in ours if name < "0020"] == list(FAILURES)


@pytest.fixture(scope="module")
def failures() -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """By patch, its case without it: two at a time, as a process's start takes one core."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            patch: pool.submit(
                run,
                name_of(patch),
                before=patch,
                **ONE_THREAD,
                **(WITHOUT_PLUGIN if patch in STOCK_KERNELS else {}),
            )
            for patch in FAILURES
        }


# Libai is pinned: without a patch it fails today as it did when the patch was written.
@only_all
@pytest.mark.parametrize("patch", FAILURES)
def test_fails_without_the_patch(
    patch: str, failures: dict[str, Future[CompletedProcess[str]]]
) -> None:
    process = failures[patch].result()
    assert process.returncode != 0, process.stdout
    assert any(text in process.stdout for text in FAILURES[patch].split("|")), process.stdout


def test_all_is_mended_with_the_patches() -> None:
    names = [name_of(patch) for patch in FAILURES]
    process = run(*names)
    assert process.returncode == 0, process.stdout
    assert [line for line in process.stdout.splitlines() if line.startswith("mended")] == [
        f"mended {name}" for name in names
    ]


def test_all_devices_run_on_stock_kernels_without_fused_operators() -> None:
    process = run("layer_norm_device", "fused_operators", "dropout", **WITHOUT_PLUGIN)
    assert process.returncode == 0, process.stdout
    assert "fused operators are switched off: it needs the CPU plug-in" in process.stdout


def patched_sources() -> Iterator[tuple[str, str]]:
    """Path and text of each Python file of libai, with all patches."""
    patches = load_series(patch_root(), "libai", "0.1.1")
    for file in importlib.metadata.files("libai") or []:
        if file.suffix == ".py":
            path = str(file)
            lines = source_lines(Path(str(file.locate())).read_text("utf-8"))
            for patch in patches:
                if path in patch.hunks:
                    lines = apply_hunks(lines, patch.hunks[path], label=patch.label, path=path)
            yield path, join(lines)


def test_no_patched_file_names_a_device() -> None:
    found = []
    for path, text in patched_sources():
        for node in ast.walk(ast.parse(text)):
            named = isinstance(node, ast.Constant) and node.value in ("cuda", "mlu", "gpu")
            if named or (isinstance(node, ast.Attribute) and node.attr == "cuda"):
                found.append(f"{path}: {ast.unparse(node)}")
    assert not found
