"""A ViT that is cut over processes trains as one that is whole, is resumed on any number of
processes, and survives what happens to processes and disks."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import oneflow_accel
from oneflow_accel import layouts
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow
import pytest

from flow_train.checkpoint.folders import read_checkpoint
from monarch_flow import convert
from tests.launch import free_port, run_distributed, run_process
from tests.machines import train_until_one_is_killed, two_machines
from tests.tolerances import assert_close
from tests.vit_10b.conftest import SCRIPT, SMALL, largest_gap, run_vit, values, weights
from vit_10b import consolidate, run_vit_training
from vit_10b.model import ViT
from vit_10b.options import parse_options, shape_of
from vit_10b.plan import Plan

# 13 million parameters: 0.2 GB, and the process half as much again.
WIDER = ("--embed_dim", "512", "--num_blocks", "4", "--ckpt_step_interval", "1", "--max_steps", "3")
STEPS = ("--max_steps", "10")
DROPOUT = ("--pos_dropout", "0.1", "--att_dropout", "0.2", "--mlp_dropout", "0.3")
BLOCKDIAG = "{_target_: blockdiag, nblocks: 5}"
STRUCTURED = ("--mlp_cfg", "{_target_: monarch, nblocks: 3}", "--attnlinear_cfg", BLOCKDIAG)
STRUCTURED += ("--attnproj_cfg", "{_target_: monarch, nblocks: 2}")
# Dense from the second epoch on, which begins after step 8.
SWITCHED = (*STRUCTURED, "--sparse_to_dense", "0.5")
# The 4-process runs that all "resumed" ones go on from are at step 6, or 9.
GO_ON = ("--resume", "auto", "--reshard")
MODES: dict[int, dict[str, tuple[str, ...]]] = {
    4: {
        "groups": ("--shard_group", "2"),
        "begun": ("--max_steps", "6"),
        "structured begun": (*STRUCTURED, "--max_steps", "6"),
        "switched begun": (*SWITCHED, "--max_steps", "6"),
        "switched, begun later": (*SWITCHED, "--max_steps", "9"),
    },
    # Each option once. 3 divides neither channels nor classes.
    3: {
        "resumed": GO_ON,
        "weights-kept": ("--no_reshard_after_forward",),
        "flat": ("--flatten_parameters", "--shard_multiple", "128"),
        "ahead-no-recomputation": ("--prefetch", "--no_grad_ckpt"),
        "dropout": DROPOUT,
        "dropout-kept": (*DROPOUT, "--no_grad_ckpt", "--no_reshard_after_forward"),
        "profile": ("--profile", "1"),
        "structured resumed": (*STRUCTURED, *GO_ON),
        "structured flat": (*STRUCTURED, "--flatten_parameters", "--no_grad_ckpt", "--prefetch"),
        "switched resumed": (*SWITCHED, *GO_ON),
        "switched flat": (*SWITCHED, "--flatten_parameters", "--prefetch"),
        "switched, no-recomputation": (*SWITCHED, "--no_grad_ckpt"),
    },
    1: {
        "whole": ("--run_without_fsdp",),
        "resumed": GO_ON,
        "structured whole": (*STRUCTURED, "--run_without_fsdp"),
        "switched whole": (*SWITCHED, "--run_without_fsdp"),
        "switched, resumed later": (*SWITCHED, *GO_ON),
    },
}
COMPARED = ("4/groups", "3/resumed", "3/weights-kept", "3/flat", "3/ahead-no-recomputation")
COMPARED += ("1/resumed", "3/structured resumed", "3/structured flat")
COMPARED += ("3/switched resumed", "3/switched flat", "3/switched, no-recomputation")
COMPARED += ("1/switched, resumed later",)
# A fixture starts all modes.
pytestmark = pytest.mark.timeout(600)


def test_the_plan_is_what_a_run_takes(shapes: Path, tmp_path: Path) -> None:
    """With the checkpoints that it writes."""
    argv = [*SMALL, *WIDER, "--data_dir", str(shapes), "--ckpt_dir", str(tmp_path)]
    run_vit([argv])
    options = parse_options(argv)
    planned = Plan.of(options, shape_of(options), 1).bytes / 1e9
    # Of a card there is no process beside the tensors, which are few here.
    rel = 0.15 if oneflow_accel.current_backend().supports("host_memory") else 0.3
    assert values(tmp_path, "peak_memory_gb")[-1] == pytest.approx(planned, rel=rel)


@pytest.fixture(scope="module")
def runs(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each mode in the folder PROCESSES/MODE; one start for each number of processes."""
    folder = tmp_path_factory.mktemp("vit")
    for processes, modes in MODES.items():
        lines = []
        for name, more in modes.items():
            out = folder / f"{processes}/{name}"
            if "--resume" in more:
                shutil.copytree(folder / f"4/{name.replace('resumed', 'begun')}", out)
            line = (*SMALL, *STEPS, *more, "--data_dir", shapes, "--ckpt_dir", out)
            lines.append(line)
        (folder / f"{processes}.txt").write_text(run_vit(lines, processes).stdout)
    return folder


@pytest.mark.parametrize("mode", COMPARED)
def test_every_mode_trains_as_the_whole_model(runs: Path, mode: str) -> None:
    """Those that are resumed on another number of processes too."""
    layers = [kind for kind in ("structured ", "switched ") if kind.strip() in mode]
    whole = runs / f"1/{''.join(layers)}whole"
    assert min(values(whole, "grad_norm")) > 0.5, "the norm was never clipped"
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(values(runs / mode, name), values(whole, name), rtol=1e-6)
    np.testing.assert_allclose(
        values(runs / mode, "loss", "val"), values(whole, "loss", "val"), rtol=1e-6
    )
    assert largest_gap(weights(runs / mode), weights(whole)) < 1e-5
    if "switched" in mode:
        before, after = (
            values(runs / mode, f"loss_{when}", "switch") for when in ("before", "after")
        )
        assert before == pytest.approx(after, rel=1e-6)
        assert len(before) == 1


def test_dropout_draws_the_same_masks_again(runs: Path) -> None:
    again, kept = (values(runs / "3" / name, "loss") for name in ("dropout", "dropout-kept"))
    np.testing.assert_allclose(again, kept, rtol=1e-6)


def test_a_structured_checkpoint_becomes_a_dense_one_of_the_same_function(
    runs: Path, tmp_path: Path
) -> None:
    """By three commands; another number of processes goes on from it."""
    whole, dense = tmp_path / "whole.safetensors", tmp_path / "dense.safetensors"
    given = runs / "4/structured begun/checkpoints/step-00000006"
    assert consolidate.main(["--ckpt_prefix", str(given), "--save_path", str(whole)]) == 0
    assert convert.main(["densify", str(whole), str(dense), "--join-qkv"]) == 0
    split = ["--split", str(dense), "--processes", "2", "--save_path", str(tmp_path / "cut")]
    assert consolidate.main(split) == 0
    images, scores = flow.randn(3, 3, 16, 16), []
    for argv, folder in ((STRUCTURED, given), ((), tmp_path / "cut/checkpoints/step-00000000")):
        state = dict(read_checkpoint(folder).model)
        options = parse_options([*SMALL, *argv])
        model = ViT(shape_of(options, len(state["head.bias"]))).eval()
        layouts.load_standard_state_dict(model, state, strict=True)
        with flow.no_grad():
            scores.append(model(images).numpy())
    assert_close(scores[1], scores[0], reduced=120)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_profile_of_several_processes_is_no_run(runs: Path) -> None:
    output = (runs / "3.txt").read_text()
    assert output.count("a step takes") == 1
    assert "eager_ccl_reduce_scatter" in output
    assert [path.name for path in (runs / "3/profile").iterdir()] == ["profile.json"]


def test_another_number_of_processes_must_be_allowed(runs: Path, shapes: Path) -> None:
    line = (*SMALL, "--data_dir", shapes, "--ckpt_dir", runs / "4/begun", "--resume", "auto")
    sentence = r"was written by 4 processes and this job cuts the model over 1.*--reshard"
    with pytest.raises(UserError, match=sentence):
        run_vit_training.run(list(map(str, line)))


# The second process may not write files larger than 10 kB from its second checkpoint on.
FULL_DISK = """
import resource, signal, sys
from vit_10b import run_vit_training
from flow_train.checkpoint import folders
from oneflow_accel import command, distributed
write, calls = folders._write_pieces, []
def limited(*args):
    calls.append(1)
    if distributed.rank() == 1 and len(calls) == 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
    return write(*args)
folders._write_pieces = limited
sys.exit(run_vit_training.main(sys.argv[1:]))
"""


def test_a_full_disk_of_one_process_ends_all_and_spoils_nothing(
    shapes: Path, tmp_path: Path
) -> None:
    script, out = tmp_path / "full.py", tmp_path / "out"
    script.write_text(FULL_DISK)
    args = [*map(str, (*SMALL, "--data_dir", shapes, "--ckpt_dir", out, "--ckpt_step_interval", 2))]
    began = time.monotonic()
    result = run_distributed([script, *args], 2, timeout=60)
    assert time.monotonic() - began < 45
    assert result.returncode != 0
    assert "error: rank 1: the checkpoint could not be written on " in result.stdout
    assert "shard-00001-of-00002.safetensors: File too large" in result.stdout
    assert "earlier checkpoints are intact" in result.stdout
    assert (
        "Traceback"
        not in result.stdout.partition("subprocess.CalledProcessError")[0].partition(
            "Killing subprocess"
        )[0]
    )
    assert sorted(path.name for path in (out / "checkpoints").glob("*step*")) == ["step-00000002"]
    run_vit([(*args, "--resume", "auto", "--reshard")])
    assert len(values(out, "loss")) == 16


def test_a_mistake_is_said_once_and_without_a_traceback(shapes: Path, tmp_path: Path) -> None:
    """One that is found after the start of two processes; others: test_vit_options.py."""
    line = (*SMALL, "--data_dir", shapes, "--ckpt_dir", tmp_path / "none", "--warmup_steps", "99")
    command = ["-m", "oneflow_accel.launch", "--nproc_per_node", "2", "--master_port"]
    result = run_process([*command, str(free_port()), SCRIPT, *map(str, line)])
    assert result.returncode == 2, result.stdout
    assert result.stdout.count("--warmup_steps 99: the run has 16 steps") == 1, result.stdout
    assert "Traceback" not in result.stdout


def test_two_machines_with_a_folder_each_are_killed_and_go_on(
    shapes: Path, runs: Path, tmp_path: Path
) -> None:
    """Each has its own process's shard only; both must have a checkpoint for it to count."""
    outs = [tmp_path / "0", tmp_path / "1"]
    options = [*map(str, (*SMALL, *STEPS, "--data_dir", shapes, "--ckpt_step_interval", 2))]

    def command(rank: int, address: str, port: int, *more: str) -> list[str | os.PathLike[str]]:
        launcher = [sys.executable, "-m", "oneflow.distributed.launch", "--nproc_per_node", "1"]
        launcher += ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", address]
        launcher += ["--master_port", str(port), str(SCRIPT)]
        return [*launcher, *options, *more, "--ckpt_dir", outs[rank]]

    with two_machines("namespaces") as machines:
        ready = lambda: _lines(outs[0] / "metrics.jsonl") >= 5  # noqa: E731
        ended = train_until_one_is_killed(machines, command, tmp_path, outs, ready, cwd=tmp_path)
        assert ended.sentence in ended.output, ended.output
        names = [sorted(path.name for path in out.glob("checkpoints/step-*/*")) for out in outs]
        assert set(names[0]) == {"shard-00000-of-00002.safetensors", "state.json"}
        assert set(names[1]) == {"shard-00001-of-00002.safetensors", "state.json"}
        # The newest of one is lost, so that they have to agree on the one before.
        shutil.rmtree(sorted(outs[1].glob("checkpoints/step-*"))[-1])
        port = free_port()
        jobs = [
            machines.popen(
                rank,
                command(rank, machines.address, port, "--resume", "auto"),
                tmp_path / f"{rank}.log",
                env={},
                cwd=tmp_path,
            )
            for rank in (0, 1)
        ]
        codes = [job.wait(90) for job in jobs]
    assert codes == [0, 0], (tmp_path / "0.log").read_text()
    np.testing.assert_allclose(values(outs[0], "loss"), values(runs / "1/whole", "loss"), rtol=1e-6)
