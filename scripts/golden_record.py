"""Golden record: today's trainers against those of an earlier commit, or those on a device against
those on the CPU.

    python scripts/golden_record.py [--device NAME [--tolerance R]] [NAME ...]

Unpacks commit START in build/golden, with its own kernels and today's environment, and runs each
case with both: five steps, then a resume to the tenth. Compared are the losses and accuracies of
all steps and validations, to the last bit, and the run's folder: the names of its files, and what
those of tensors hold. Today's code also goes on from the checkpoint that START has written. Exit
code 1 where anything differs.

With --device, today's code on the CPU takes START's place. With --tolerance, for a card, only
losses are compared, after a resume from the CPU's checkpoint and without dropout: first weights and
masks are drawn by the device.

The variable GOLDEN_RECORD names another folder. Not a test: bits differ from one kind of CPU to
another, so nothing is stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
START = "016316b"
WORK = Path(os.environ.get("GOLDEN_RECORD", ROOT / "build" / "golden"))
MIDDLE, END = 5, 10
# The logged values that do not depend on the clock.
COMPARED = ("loss", "acc1", "acc5", "lr", "total_loss", "lm_loss_PPL")
# Runs of several processes start with one thread each, and so do the others here.
ENVIRONMENT = {"ONEFLOW_ACCEL_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """A run of one of the trainers: `command` is typed after `python` in `folder`, with the
    folders {out} and {data} and the number of steps done at the end, {steps}; `resume` is added
    to go on."""

    command: Sequence[str]
    resume: str
    folder: str = "."
    processes: int = 1


def _resnet(*options: str, processes: int = 1) -> Case:
    """8 images a step, 7 steps an epoch."""
    command = ["main.py", "-a", "resnet18", "--image-size", "32", "-b", "8", "--seed", "1"]
    command += ["-j", "0", "-p", "1", "--lr", "0.01", "--max-steps", "{steps}"]
    command += ["--output-dir", "{out}", *options, "{data}/photos"]
    return Case(command, "--resume=auto", "resnet50_imagenet", processes)


def _monarch(experiment: str, *options: str, processes: int = 1) -> Case:
    """16 digits a step, 8 steps an epoch."""
    command = ["-m", "monarch_flow.train", f"experiment=mnist/{experiment}"]
    command += ["datamodule.data_dir={data}/digits", "run_dir={out}", "trainer.max_steps={steps}"]
    command += ["trainer.log_every_n_steps=1", "train.global_batch_size=16"]
    command += [f"datamodule.batch_size={16 // processes}", "datamodule.num_workers=0"]
    command += ["trainer.max_epochs=2", "test_after_training=false", *options]
    return Case(command, "resume=auto", processes=processes)


def _libai(*options: str, processes: int = 1) -> Case:
    """8 sequences of 32 tokens a step."""
    command = ["tools/train_net.py", "--config-file"]
    command += ["projects/MagicPrompt/configs/gpt2_training.py"]
    command += [
        "model.cfg.num_layers=2",
        "model.cfg.hidden_size=64",
        "model.cfg.ffn_hidden_size=128",
        "model.cfg.num_attention_heads=4",
        "model.cfg.max_seq_length=32",
        "optim.lr=1e-3",
        "train.scheduler.gamma=0.95",
        "train.train_epoch=0",
        "train.train_iter={steps}",
        "train.log_period=1",
        f"train.checkpointer.period={MIDDLE}",
        "train.evaluation.eval_period=5",
        "train.evaluation.eval_iter=3",
        "train.train_micro_batch_size=null",
        "train.global_batch_size=8",
        "dataloader.train.num_workers=0",
        "dataloader.train.splits=[[80,10,10]]",
        "train.output_dir={out}",
        *options,
    ]
    return Case(command, "--resume", "libai_projects", processes)


def _vit_10b(processes: int = 1) -> Case:
    """8 images a step, 7 steps an epoch."""
    command = ["vit_10b/run_vit_training.py", "--data_dir", "{data}/photos", "--image_size", "32"]
    command += ["--patch_size", "8", "--embed_dim", "32", "--num_heads", "2", "--num_blocks", "2"]
    command += ["--batch_size", "8", "--num_workers", "0", "--num_epochs", "2", "--seed", "1"]
    command += ["--warmup_steps", "2", "--log_step_interval", "1", "--max_steps", "{steps}"]
    return Case([*command, "--ckpt_dir", "{out}"], "--resume=auto", processes=processes)


def _llama(*options: str, processes: int = 1) -> Case:
    """2 sequences of 128 tokens a step and process."""
    command = ["projects/Llama/pretrain.py", "--preset=tiny", "--dummy", "--batch_size=2"]
    command += ["--vocab_size=512", "--num_accumulation_steps=1", "--warmup_iters=2"]
    command += [f"--lr_decay_iters={END}", f"--save_interval={MIDDLE}", "--max_iters={steps}"]
    command += ["--output_dir={out}", *options]
    return Case(command, "--resume", "libai_projects", processes)


_VIT = ("model.patch_size=7", "model.embed_dim=32", "model.depth=2", "model.num_heads=2")
_TWO = ("--multiprocessing-distributed",)
_EAGER, _GRAPH = "graph.enabled=false", "graph.enabled=true"
_ACCUMULATION = "train.num_accumulation_steps=2"
# Dense from the second step on.
_SPARSE_TO_DENSE = ("model.cfg.attnlinear_cfg=blockdiag", "model.cfg.mlp_cfg=monarch")
_SPARSE_TO_DENSE += ("train.sparse_to_dense.fraction=0.3",)
_BF16 = ("train.amp.enabled=true", "train.amp.precision=bfloat16")
_AVERAGE = "callbacks.ema={decay: 0.9}"
CASES = {
    "resnet": _resnet(),
    "resnet-channels-last": _resnet("--channels-last"),
    "resnet-graph": _resnet("--graph"),
    "resnet-accumulation-average": _resnet(
        "--grad-accum-steps", "2", "--model-ema", "--model-ema-decay", "0.9"
    ),
    "resnet-2-processes": _resnet(*_TWO, processes=2),
    "resnet-graph-2-processes": _resnet(*_TWO, "--graph", processes=2),
    "vit": _monarch("vit", *_VIT),
    "vit-monarch": _monarch("vit-monarch", *_VIT, "trainer.gradient_clip_val=1.0"),
    # Dense from the second epoch on.
    "vit-sparse-to-dense": _monarch(
        "vit-monarch-s2d", *_VIT, _AVERAGE, "train.sparse_to_dense.fraction=0.5"
    ),
    "vit-graph": _monarch("vit", *_VIT, "trainer.graph=true"),
    "vit-accumulation": _monarch(
        "vit", *_VIT, "trainer.accumulate_grad_batches=2", "datamodule.batch_size=8"
    ),
    "vit-2-processes": _monarch("vit", *_VIT, processes=2),
    "vit-graph-2-processes": _monarch("vit", *_VIT, "trainer.graph=true", processes=2),
    "vitae-average": _monarch("vitae-tiny", _AVERAGE),
    # Its dropout is the config's, 0.1.
    "gpt2": _libai(_EAGER),
    "gpt2-accumulation": _libai(_EAGER, _ACCUMULATION),
    "gpt2-graph-accumulation": _libai(_GRAPH, _ACCUMULATION),
    "gpt2-sparse-to-dense": _libai(_EAGER, *_SPARSE_TO_DENSE),
    "gpt2-graph-sparse-to-dense": _libai(_GRAPH, *_SPARSE_TO_DENSE),
    "gpt2-PP2": _libai(_EAGER, "train.dist.pipeline_parallel_size=2", processes=2),
    "gpt2-graph-TP2-PP2": _libai(
        _GRAPH,
        "train.dist.tensor_parallel_size=2",
        "train.dist.pipeline_parallel_size=2",
        processes=4,
    ),
    "gpt2-ZeRO2": _libai(
        _GRAPH,
        "train.zero_optimization.enabled=true",
        "train.zero_optimization.stage=2",
        processes=2,
    ),
    "vit-10b": _vit_10b(),
    "vit-10b-2-processes": _vit_10b(processes=2),
    "llama": _llama(),
    "llama-accumulation": _llama("--num_accumulation_steps=2"),
    "llama-2-processes": _llama(processes=2),
    "bf16-resnet-graph": _resnet("--precision=bfloat16", "--graph"),
    "bf16-resnet-2-processes": _resnet("--precision=bfloat16", *_TWO, processes=2),
    "bf16-vit-monarch": _monarch("vit-monarch", *_VIT, "trainer.precision=bfloat16"),
    "bf16-vit-graph-2-processes": _monarch(
        "vit", *_VIT, "trainer.graph=true", "trainer.precision=bfloat16", processes=2
    ),
    "bf16-gpt2-graph": _libai(_GRAPH, *_BF16),
    "bf16-gpt2-TP2": _libai(_EAGER, "train.dist.tensor_parallel_size=2", *_BF16, processes=2),
}
# How a model is typed without its dropout, by the beginning of the case's name.
WITHOUT_DROPOUT = {
    "gpt2": [f"model.cfg.{name}_dropout_prob=0" for name in ("embedding", "attention", "output")]
}


@dataclass(frozen=True)
class Tree:
    """The folder of a checkout, and the device that it trains on."""

    root: Path
    device: str = "cpu"

    def run(self, case: Case, out: Path, steps: int, *, resume: bool) -> None:
        """Train up to a step; a run that fails prints its output and ends the process."""
        words = {"out": str(out), "steps": str(steps), "data": str(WORK / "data")}
        # Options may hold braces of their own.
        typed = [re.sub(r"\{(out|steps|data)\}", lambda m: words[m[1]], t) for t in case.command]
        if resume:
            typed.append(case.resume)
        command = [sys.executable]
        if case.processes > 1:
            command += ["-m", "oneflow_accel.launch", "--master_port", "auto"]
            command += ["--nproc_per_node", str(case.processes)]
        environment = {**os.environ, **ENVIRONMENT, **_vocabulary(), "PYTHONPATH": str(self.root)}
        environment["ONEFLOW_ACCEL_DEVICE"] = self.device
        done = subprocess.run(
            [*command, *typed],
            cwd=self.root / case.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{' '.join(typed)} has failed in {self.root}")


def old_tree() -> Tree:
    """START's files and kernels, made once."""
    tree = Tree(WORK / START)
    if not tree.root.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        begun, archive = WORK / "begun", WORK / "start.tar"
        shutil.rmtree(begun, ignore_errors=True)
        subprocess.run(["git", "archive", "--output", archive, START], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, begun)
        # Not `make plugin`, which needs an environment of its own. Where the C++ is today's, the
        # libraries are those that setup.py has kept.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "ONEFLOW_ACCEL_REQUIRE_PLUGIN": "1"}
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=begun, env=environment, check=True)
        begun.rename(tree.root)
    return tree


def write_data(folder: Path) -> None:
    """Photos, digits and prompts, drawn here; the same each time, so once is enough."""
    if folder.exists():
        return
    draw = np.random.default_rng(0)
    for part, images in (("train", 56), ("val", 12)):
        for number in range(images):
            file = folder / "photos" / part / f"class{number % 4}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 200, (40, 48, 3), dtype=np.uint8)
            pixels[..., number % 3] += 10 * (number % 4)
            Image.fromarray(pixels).save(file)
    (folder / "digits").mkdir()
    for part, images in (("train", 192), ("t10k", 48)):
        labels = np.arange(images, dtype=np.uint8) % 10
        pixels = draw.integers(0, 60, (images, 28, 28), dtype=np.uint8)
        pixels += labels[:, None, None] * 18
        for kind, head, array in (
            ("images-idx3", struct.pack(">4i", 2051, images, 28, 28), pixels),
            ("labels-idx1", struct.pack(">2i", 2049, images), labels),
        ):
            (folder / "digits" / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    words = random.Random(0)
    parts = (
        ("a cute pig", "an old castle", "a portrait of a queen", "a city in the rain"),
        ("highly detailed", "digital painting", "oil on canvas", "concept art"),
        ("soft light", "dramatic lighting", "sharp focus", "8 k", "artstation"),
    )
    lines = [", ".join(words.choice(part) for part in parts) for _ in range(1500)]
    prompts = folder / "prompts"
    prompts.mkdir()
    (prompts / "prompts.txt").write_text("\n".join(lines) + "\n")
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(lines, vocab_size=400, special_tokens=special, show_progress=False)
    bpe.save_model(str(prompts))
    command = ["projects/MagicPrompt/prepare.py", str(prompts / "prompts.txt"), "--workers", "1"]
    command += ["--output-prefix", str(prompts / "data")]
    command += ["--vocab-file", str(prompts / "vocab.json")]
    command += ["--merges-file", str(prompts / "merges.txt")]
    subprocess.run(
        [sys.executable, *command], cwd=ROOT / "libai_projects", check=True, capture_output=True
    )


def _vocabulary() -> dict[str, str]:
    prompts = WORK / "data" / "prompts"
    return {
        "MAGICPROMPT_VOCAB": str(prompts / "vocab.json"),
        "MAGICPROMPT_MERGES": str(prompts / "merges.txt"),
        "MAGICPROMPT_DATA": str(prompts / "data"),
    }


def figures(out: Path) -> dict[str, float]:
    """What a run has logged, by "split/name at step"."""
    found = {}
    for file in (out / "metrics.jsonl", out / "metrics.json"):
        for text in file.read_text().splitlines() if file.exists() else ():
            line = json.loads(text)
            # LiBai's own form is flat.
            step = line.get("step", line.get("iteration"))
            for name, value in line.get("values", line).items():
                split, _, last = name.rpartition("/")
                if last in COMPARED:
                    place = line.get("split") or split or "train"
                    found[f"{place}/{last.replace('total_', '')} at {step}"] = value
    return found


def tensors(out: Path) -> dict[str, Counter[str]]:
    """The tensors of each checkpoint, by its step. LiBai's form, which START writes, has a folder
    for each, and the number of steps as one more of 8 bytes."""
    found: dict[str, Counter[str]] = {}
    for path in out.glob("model_[0-9]*/*/global_tensor_*/out"):
        step = f"step-{int(path.relative_to(out).parts[0].removeprefix('model_')) + 1:08d}"
        content = path.read_bytes()
        if len(content) != 8:
            found.setdefault(step, Counter())[hashlib.sha256(content).hexdigest()] += 1
    for path in sorted(out.rglob("*.safetensors")):
        step = found.setdefault(path.parent.name, Counter())
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            for name in names:
                step[hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()] += 1
    return found


def files(out: Path) -> set[str]:
    """The files of a run's folder, without the parts of names that are times or host names; tensors
    by their order, as oneflow's ids count all tensors that the process has had."""
    names: dict[str, None] = {}
    is_libai = (out / "metrics.json").exists()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        # START has another form of its checkpoints.
        if is_libai and path.relative_to(out).parts[0].startswith(("model_", "last_", "checkpoi")):
            continue
        name = re.sub(r"events\.out\.tfevents.*", "events.out.tfevents", str(path.relative_to(out)))
        name = re.sub(r"global_tensor_\d+", "global_tensor", name)
        while name in names:
            name += " and another"
        names[name] = None
    return set(names)


def differences(old: Path, new: Path, tolerance: float = 0.0) -> list[str]:
    """What differs in two runs' folders, in words. With a relative tolerance, losses count, and
    neither accuracies, which jump, nor tensors."""
    before, now = figures(old), figures(new)
    lines = []
    if not before:
        lines.append(f"{old} has no figures")
    for name, value in before.items():
        found = now.get(name)
        is_near = (
            found is not None
            and tolerance
            and ("/acc" in name or math.isclose(found, value, rel_tol=tolerance))
        )
        if found != value and not is_near:
            lines.append(f"{name} is {found!r} and was {value!r}")
    gone, come = files(old) - files(new), files(new) - files(old)
    lines += [f"there is no file {name} any more" for name in sorted(gone)]
    lines += [f"the file {name} is new" for name in sorted(come)]
    was, theirs = tensors(old), tensors(new)
    if not tolerance and (
        not was
        or max(was) not in theirs
        or any(was[step] != theirs[step] for step in was.keys() & theirs.keys())
    ):
        lines.append("the checkpoints' tensors differ")
    return lines


def compare(name: str, case: Case, old: Tree, new: Tree, tolerance: float = 0.0) -> list[str]:
    """Run a case in both trees; what differs, in words. The same code on two devices resumes from
    the other's checkpoint only."""
    if tolerance:
        fixed = WITHOUT_DROPOUT.get(name.partition("-")[0], [])
        case = dataclasses.replace(case, command=[*case.command, *fixed])
    runs = WORK / "runs" / name
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    old.run(case, runs / "old", MIDDLE, resume=False)
    shutil.copytree(runs / "old", runs / "crossed")
    new.run(case, runs / "new", MIDDLE, resume=False)
    found = [] if tolerance else differences(runs / "old", runs / "new")
    old.run(case, runs / "old", END, resume=True)
    for out, whose in (("crossed", "the other's"), ("new", "its own")):
        if out == "new" and old.root == new.root:
            continue
        new.run(case, runs / out, END, resume=True)
        lines = differences(runs / "old", runs / out, tolerance)
        found += [f"after a resume from {whose} checkpoint {line}" for line in lines]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", help="compare this device with the CPU, both of today")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="R", help="of losses")
    parser.add_argument("--processes", type=int, default=4, help="at most so many (default: 4)")
    options = parser.parse_args()
    # A card rounds as it does, and no profile is of a device that trains in bfloat16.
    is_other = options.tolerance or os.environ.get("ONEFLOW_ACCEL_EMULATE")
    left_out = ("bf16",) if is_other else ()
    names = options.names or [
        name
        for name, case in CASES.items()
        if case.processes <= options.processes and not name.startswith(left_out)
    ]
    unknown = set(names) - set(CASES)
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    old = Tree(ROOT) if options.device else old_tree()
    new = Tree(ROOT, options.device or "cpu")
    write_data(WORK / "data")
    wrong = 0
    for name in names:
        try:
            found = compare(name, CASES[name], old, new, options.tolerance)
        except SystemExit as failed:
            lacks = re.search("error: (.* cannot do this .*)", str(failed))
            if options.tolerance and lacks:
                print(f"{name}: not supported, {lacks[1]}", flush=True)
                continue
            found = str(failed).splitlines()[-30:]
        wrong += bool(found)
        count = len(figures(WORK / "runs" / name / "old"))
        print(f"{name}: {'the same' if not found else 'DIFFERENT'}, {count} figures", flush=True)
        for line in found:
            print(f"    {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
