"""DDP without stream_touch in builds that are not on PyPI, and who says whether it has a kernel."""

from __future__ import annotations

import hashlib
import textwrap
from types import SimpleNamespace

from oneflow_accel.backends.mlu import MluBackend
from oneflow_accel.patching import disk
from oneflow_accel.patching.series import (
    REMOVED,
    Patch,
    load_series,
    patch_root,
)

import oneflow as flow
import pytest

from tests.launch import run_process

PATH = "oneflow/nn/parallel/distributed.py"
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
