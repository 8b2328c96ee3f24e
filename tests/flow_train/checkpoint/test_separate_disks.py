"""Processes on machines without a common disk: each has an output folder of its own, and all go on
from one checkpoint, or none does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flow_train.steps.test_fsdp_runs import MONARCH
from tests.launch import run_several
from tests.resnet50_imagenet.conftest import SMALL, losses, shapes  # noqa: F401 - a fixture
from tests.vit_10b.conftest import SMALL as SMALL_VIT


@dataclass(frozen=True)
class System:
    """A trainer: its command line by data, output folder and last step; what cuts the model, and
    what resumes and evaluates."""

    module: str
    line: Callable[[Path, str, int], tuple[object, ...]]
    sharded: tuple[str, ...]
    resume: tuple[str, ...]
    evaluate: Callable[[str], tuple[str, ...]] | None = None


SYSTEMS = {
    "main": System(
        "resnet50_imagenet.main",
        lambda data, out, step: (
            *(data, "--multiprocessing-distributed", *SMALL, "--model-ema"),
            *("--output-dir", out, "--max-steps", step),
        ),
        ("--fsdp",),
        ("--resume", "auto"),
        lambda out: ("-e", "--resume", out),
    ),
    "monarch": System(
        "monarch_flow.train",
        lambda data, out, step: (
            *(*MONARCH, "trainer.devices=${world_size:}", f"datamodule.data_dir={data}"),
            *(f"run_dir={out}", f"trainer.max_steps={step}"),
        ),
        ("trainer.fsdp=full_shard",),
        ("resume=auto",),
        lambda out: (f"eval.ckpt={out}",),
    ),
    "vit": System(
        "vit_10b.run_vit_training",
        lambda data, out, step: (
            *(*SMALL_VIT, "--data_dir", data, "--ckpt_dir", out, "--max_steps", step),
        ),
        (),
        ("--resume", "auto"),
    ),
}
UNCUT = {"vit": ("--run_without_fsdp",)}


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_go_on_from_what_one_has(shapes: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    """Whole checkpoints are on the first machine only, shards on the machine that wrote them."""
    system, lines = SYSTEMS[name], []
    for kind, options in (("whole", UNCUT.get(name, ())), ("cut", system.sharded)):
        alone, own = str(tmp_path / kind), str(tmp_path / f"{kind}-{{rank}}")
        lines.append((*system.line(shapes, alone, 4), *options))
        # Resumed before there is anything, and when there is.
        lines.append((*system.line(shapes, own, 3), *options, *system.resume))
        lines.append((*system.line(shapes, own, 4), *options, *system.resume))
    if system.evaluate is not None:
        # The path of the first machine is not there on the second.
        own = tmp_path / "whole-{rank}"
        lines.append((*system.line(shapes, str(own), 4), *system.evaluate(str(own))))
    result = run_several(system.module, lines, 2, timeout=300)
    assert result.returncode == 0, result.stdout[-5000:]
    assert not (tmp_path / "whole-1" / "metrics.jsonl").exists()
    for kind in ("whole", "cut"):
        assert losses(tmp_path / f"{kind}-0") == losses(tmp_path / kind), kind
    for rank in (0, 1):
        files = {path.name for path in (tmp_path / f"cut-{rank}").glob("checkpoints/*/*")}
        assert files == {f"shard-{rank:05d}-of-00002.safetensors", "state.json"}
    # One process, and evaluation, need all shards on their machine: it is said which are missing.
    line = (*system.line(shapes, str(tmp_path / "cut-0"), 5), *UNCUT.get(name, ()), *system.resume)
    refused = run_several(system.module, [line])
    assert refused.returncode == 2, refused.stdout[-5000:]
    assert "shard-00001-of-00002.safetensors missing: copy them here" in refused.stdout
    newest = max((tmp_path / "cut-1/checkpoints").glob("step-*"))
    for shard in newest.glob("shard-*"):
        shutil.copy(shard, tmp_path / "cut-0/checkpoints" / newest.name)
    assert run_several(system.module, [line]).returncode == 0


def test_what_machines_have_must_be_the_same(shapes: Path, tmp_path: Path) -> None:  # noqa: F811
    for rank in (0, 1):
        shutil.copytree(shapes, tmp_path / f"data-{rank}")
    next((tmp_path / "data-1/train/disk").iterdir()).unlink()
    for name, system in SYSTEMS.items():
        line = system.line(tmp_path / "data-{rank}", str(tmp_path / name), 2)
        refused = run_several(system.module, [line], 2)
        found = re.findall(r"error: images of train: .*", refused.stdout)
        assert len(found) == 1, refused.stdout[-5000:]
        assert "96 for process 0 on" in found[0]
        assert "95 for process 1 on" in found[0]
        assert not list((tmp_path / name).rglob("*.json*"))
