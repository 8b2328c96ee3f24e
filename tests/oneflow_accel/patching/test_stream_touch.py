"""DDP without stream_touch in builds that are not on PyPI, and who says whether it has a kernel.

Their distributed.py is not here. What was read of it, once, is recorded: commit and blob of
Oneflow-Inc/oneflow, SHA-256 of the file and of the lines that the patch rests on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import textwrap
from types import SimpleNamespace

from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.patching import disk
from oneflow_accel.patching.series import (
    ADDED,
    REMOVED,
    Patch,
    apply_hunks,
    load_series,
    patch_root,
    source_lines,
)

import oneflow as flow
import pytest

from tests.launch import run_process

REPOSITORY_VARIABLE = "ONEFLOW_REPOSITORY"
PATH = "oneflow/nn/parallel/distributed.py"
# Commit, blob, SHA-256 of the file; number of the first line that the patch rests on.
RECORDED = {
    "0001-ddp-leave-out-stream-touch.patch": (
        "7621f9bd7d45b37b3b98fc97d18a843d7d999765",
        "cf5da8c0625f1cd8553c3ef1691c97e575d8c918",
        "db9711cbd0bcbe539a1ad4c6079f5d40ae099f47bcd8d47666b251bc8efca24f",
        188,
    ),
    "0002-ddp-leave-out-stream-touch-grouped.patch": (
        "bc551b1bfc",
        "79753c906efce0bb039cf523828bdb18360f8544",
        "b92ab25daa42f044f64d22b27e4a7dc7fc56533085f48e5cf13084d98b488c0a",
        148,
    ),
}
# The same seven lines in both, as `sed -n FIRST,+6p | sha256sum` gave it.
LINES_SHA256 = "5d364132eec549b8c7ed16520cf859b659545e055cc3def294e54391b7fbffc2"
PATCHES = load_series(patch_root(), "oneflow", "1.0.0")
EACH = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
# oneflow as it comes, without the emulated device: its type mock has memory and no such kernel.
ASK = """
from oneflow_accel.backends.mlu import MluBackend
class Card(MluBackend):
    name = "{device}"
    _problems = activate = lambda self: []
print("touch", Card().supports("ddp_stream_touch"))
"""


@EACH
def test_a_patch_rests_on_the_lines_that_were_read(patch: Patch) -> None:
    *_, sha256, first = RECORDED[patch.name]
    ((path, (hunk,)),) = patch.hunks.items()
    before = "".join(text for kind, text in hunk.lines if kind != ADDED)
    assert (path, patch.for_file, hunk.source_index + 1) == (PATH, sha256, first)
    assert hashlib.sha256(before.encode()).hexdigest() == LINES_SHA256


@EACH
def test_patched_lines_do_without_a_kernel_and_hide_nothing_else(patch: Patch) -> None:
    after = "".join(text for kind, text in patch.hunks[PATH][0].lines if kind != REMOVED)
    body = after[after.index("        buffers") : after.index("        return")]
    seen: list[object] = []

    def run(touch) -> None:
        names = {"flow": SimpleNamespace(_C=SimpleNamespace(stream_touch=touch))}
        exec(textwrap.dedent(body), names | {"module": flow.nn.BatchNorm1d(2)})

    run(seen.append)
    assert len(seen[0]) == 3  # The mean, the variance and their count.
    with pytest.raises(RuntimeError, match="Cannot find the kernel"):
        flow._C.gelu(flow.ones(2).int())
    run(lambda buffers: flow._C.gelu(flow.ones(2).int()))
    with pytest.raises(IndexError):
        run(lambda buffers: buffers[3])
    with pytest.raises(RuntimeError, match="number of dims"):
        run(lambda buffers: flow.ones(2, 2).permute(0, 0, 0))


@pytest.mark.parametrize("here", ["1", "2"])
def test_of_two_patches_the_one_for_the_installed_file_is_taken(fake, here: str) -> None:
    text = fake.numbers.read_text()
    for number in ("1", "2"):
        content = f"# build {number}\n" + text
        fake.add_patch(
            f"000{number}-change.patch",
            before={"numbers": content},
            edits={"numbers": ("return 1", f"return {number}0")},
            Applies_To_File=hashlib.sha256(content.encode()).hexdigest(),
        )
    fake.numbers.write_text(f"# build {here}\n" + text)
    # On disk, where the file is then another one, and in memory.
    assert disk.apply(fake.root, fake.name) == [f"{fake.name}/numbers.py"]
    assert disk.apply(fake.root, fake.name) == []
    disk.revert(fake.name)
    fake.install()
    assert fake.load().one() == int(here) * 10


@pytest.mark.parametrize(("device", "has"), [("mock", False), ("cpu", True)])
def test_a_launch_tells_whether_a_device_has_the_kernel(device: str, has: bool) -> None:
    process = run_process(["-c", ASK.format(device=device)], env={"ONEFLOW_ACCEL_DEVICE": "cpu"})
    assert process.returncode == 0, process.stdout
    assert f"touch Support(ok={has}" in process.stdout


def test_without_a_card_there_is_no_kernel_and_the_reason_says_so() -> None:
    support = MluBackend().supports("ddp_stream_touch")
    assert not support
    assert "no card can be used: no Cambricon driver" in support.reason


@pytest.mark.skipif(REPOSITORY_VARIABLE not in os.environ, reason=f"no {REPOSITORY_VARIABLE}")
@EACH
def test_a_patch_fits_the_file_in_the_clone(patch: Patch) -> None:
    commit, blob, sha256, _ = RECORDED[patch.name]
    git = ["git", "-C", os.environ[REPOSITORY_VARIABLE]]
    found = subprocess.check_output([*git, "rev-parse", f"{commit}:python/{PATH}"], text=True)
    content = subprocess.check_output([*git, "cat-file", "blob", blob])
    assert (found.strip(), hashlib.sha256(content).hexdigest()) == (blob, sha256)
    lines = apply_hunks(
        source_lines(content.decode()), patch.hunks[PATH], label=patch.label, path=PATH
    )
    assert len(lines) == content.count(b"\n") + 5
