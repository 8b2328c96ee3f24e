"""Machines without a common disk, {rank} being in the names of what each has: every command goes on
from one checkpoint, or ends on all processes with a sentence, before anything is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.flow_train.steps.test_fsdp_runs import MONARCH
from tests.launch import run_distributed, several_runs
from tests.libai_projects.train.conftest import CONFIG, PROJECTS, TINY, environment, prompts  # noqa: F401
from tests.libai_projects.train.conftest import losses as libai_losses
from tests.resnet50_imagenet.conftest import SMALL, losses, shapes  # noqa: F401
from tests.vit_10b.conftest import SMALL as SMALL_VIT
from vit_10b import consolidate

Words = tuple[object, ...]
MISSING = "missing: copy them here from the machines whose processes wrote them"


def main_line(folder: Path, out: str, step: int, *more: object, data: str = "here") -> Words:
    words = (folder / data, "--multiprocessing-distributed", *SMALL, "--model-ema", *more)
    return "resnet50_imagenet.main", *words, "--output-dir", folder / out, "--max-steps", step


def monarch_line(folder: Path, out: str, step: int, *more: object, data: str = "here") -> Words:
    words = (*MONARCH, "trainer.devices=${world_size:}", "train.global_batch_size=8", *more)
    words += (f"datamodule.data_dir={folder / data}", f"run_dir={folder / out}")
    return "monarch_flow.train", *words, f"trainer.max_steps={step}"


def vit_line(folder: Path, out: str, step: int, *more: object, data: str = "here") -> Words:
    words = (*SMALL_VIT, "--data_dir", folder / data, "--ckpt_dir", folder / out, *more)
    return "vit_10b.run_vit_training", *words, "--max_steps", step


def libai_line(folder: Path, out: str, step: int, *more: object, data: str = "") -> Words:
    words = ("--config-file", PROJECTS / CONFIG, *TINY, "train.checkpointer.period=1", *more)
    if data:
        words += (f"dataloader.train.dataset.0.data_prefix={folder / data}/tokens",)
    words += (f"train.output_dir={folder / out}", f"train.train_iter={step}")
    return "libai_projects.tools.train_net", *words


def llama_line(folder: Path, out: str, step: int, *more: object, data: str = "here") -> Words:
    words = ("--preset=tiny", "--max_seq_len=16", "--batch_size=2", "--vocab_size=2000")
    words += ("--gradient_accumulation_steps=2", "--save_interval=1", *more)
    words += (f"--data={folder / data}/tokens.bin", f"--output_dir={folder / out}")
    return "libai_projects.projects.Llama.pretrain", *words, f"--max_iters={step}"


@dataclass(frozen=True)
class System:
    """A trainer: its command by folder, step and data; options that resume it, cut the model, leave
    it whole, and evaluate a folder; one that differs between the processes; and whether it has all
    lines, or those that show that the command asks.

    The others are sentences, "" where it goes on: where data are on one machine only, or others
    there; where a process asks for no steps; where the second only has a checkpoint to evaluate, or
    each has its shards only; and where each has the other's shards, or shards meet a run that does
    not cut. LiBai's first process reads for all."""

    line: Callable[..., Words]
    resume: Words
    cut: Words
    differs: Words
    gone: str
    other: str = "images of train: 96 for process 0"
    whole: Words = ()
    zero: str = "rank 0: "
    evaluate: Callable[[Path], Words] | None = None
    evaluated: str = ""
    cut_evaluated: str = ""
    sharded: str = MISSING
    full: bool = False


SYSTEMS = {
    "main": System(
        main_line,
        ("--resume", "auto"),
        ("--fsdp",),
        ("--seed", "{rank}"),
        "there is no folder",
        evaluate=lambda out: ("-e", "--resume", out),
        full=True,
    ),
    "monarch": System(
        monarch_line,
        ("resume=auto",),
        ("trainer.fsdp=full_shard", "test_after_training=true"),
        ("seed={rank}",),
        "is not there",
        evaluate=lambda out: (f"eval.ckpt={out}",),
        cut_evaluated=MISSING,
    ),
    "vit": System(
        vit_line,
        ("--resume", "auto"),
        (),
        ("--seed", "{rank}"),
        "there is no folder",
        whole=("--run_without_fsdp",),
    ),
    "libai": System(
        libai_line,
        ("--resume",),
        ("train.dist.tensor_parallel_size=2",),
        ("train.seed={rank}",),
        "does not exist",
        other="",
        zero="train.train_iter: 0 for process 0 on",
        evaluate=lambda _: ("--eval-only",),
        evaluated="holds no checkpoint",
        sharded="",
        full=True,
    ),
    "llama": System(
        llama_line,
        ("--resume",),
        ("--tensor_parallel=2",),
        ("--seed={rank}",),
        "there is no token file",
        "the bytes of dataloader.train.dataset.0: 4000 for process 0",
        sharded="",
    ),
}


def lines(system: System, folder: Path) -> Iterator[tuple[Words, str]]:
    """Command lines, and what each ends with."""
    go_on, cut, whole = system.resume, system.cut, system.whole
    line = partial(system.line, folder)
    # Resumed before there is anything, and when the first machine has it.
    yield line("first-{rank}", 3, *whole, *go_on), ""
    yield line("first-{rank}", 4, *whole, *go_on), ""
    if system.evaluate is not None:
        for out, said in (("first-{rank}", ""), ("none-{rank}", "no checkpoint")):
            yield line(out, 4, *system.evaluate(folder / out)), said
    yield line("cut-{rank}", 2, *cut, *go_on), ""
    yield line("cut-{rank}", 3, *cut, *go_on), ""
    if system.evaluate is not None:
        yield line("cut-{rank}", 3, *system.evaluate(folder / "cut-{rank}")), system.cut_evaluated
    if system.full:
        yield from more_lines(system, folder)
    yield line("cut-{other}", 5, *cut, *go_on), system.sharded
    yield line("differs", 1, *whole, *system.differs), "0 for process 0 on"
    yield line("gone", 1, *whole, data="gone-{rank}"), system.gone
    if system.other:
        yield line("other", 1, *whole, data="other-{rank}"), system.other


def more_lines(system: System, folder: Path) -> Iterator[tuple[Words, str]]:
    go_on, cut, whole = system.resume, system.cut, system.whole
    line = partial(system.line, folder)
    assert system.evaluate is not None
    yield line("whole", 4, *whole), ""
    yield line("second-{other}", 3, *whole), ""
    yield line("second-{rank}", 4, *system.evaluate(folder / "second-{rank}")), system.evaluated
    yield line("second-{rank}", 4, *whole, *go_on), ""
    yield line("steps-{rank}", 2, *whole), ""
    yield line("steps-{other}", 3, *whole), ""
    yield line("steps-{rank}", 4, *whole, *go_on), ""
    yield line("cut", 4, *cut), ""
    yield (__name__, folder / "cut-{rank}"), ""
    yield line("cut-{rank}", 4, *cut, *go_on), ""
    yield line("cut-{rank}", 5, *whole, *go_on), system.sharded
    yield line("differs", "{rank}", *whole), system.zero


def main(argv: Sequence[str]) -> None:
    """As where a kill came between the ends of a save: the second machine had it already, and has
    the next of that name beside it."""
    saved = sorted(Path(argv[0]).glob("checkpoints/step-*"))
    if len(saved) > 1 and argv[0].endswith("-1"):
        saved[1].rename(saved[1].with_name(f"{saved[1].name}.2"))
        saved[0].rename(saved[1])


def generated(folder: Path) -> Iterator[tuple[Words, str]]:
    """The same of a config, and of prompts, continued by what `libai` has trained."""
    config = ("--config-file", folder / "config-{rank}.py")
    yield libai_line(folder, "gone", 1, *config), "rank 1: --config-file"
    for out, words, said in (
        ("first-{rank}", "gone-0", ""),
        ("second-{rank}", "gone-0", ""),
        ("first-0", "gone-{rank}", "rank 1: vocabulary file"),
        ("first-0", "other-{rank}", "the tokenizer's words: "),
    ):
        line = ("--prompt", "a", "--max-new-tokens", 2, "--model", folder / out)
        words = folder / f"words-{words}"
        line += ("--vocab-file", words / "vocab.json", "--merges-file", words / "merges.txt")
        yield ("libai_projects.projects.MagicPrompt.pipeline", *line), said


@pytest.fixture
def folder(tmp_path: Path, shapes: Path, prompts: dict[str, str]) -> Path:  # noqa: F811
    """Data: `here`; `gone`, on the first machine only; `other`, with fewer images and tokens on the
    second, and the same words by other numbers."""
    np.arange(2000, dtype=np.uint16).tofile(shapes / "tokens.bin")
    for name in ("here", "gone-0", "other-0"):
        (tmp_path / name).symlink_to(shapes)
    shutil.copytree(shapes, tmp_path / "other-1")
    next((tmp_path / "other-1/train/disk").iterdir()).unlink()
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "other-1/tokens.bin")
    (tmp_path / "config-0.py").symlink_to(PROJECTS / CONFIG)
    for name in ("words-gone-0", "words-other-0", "words-other-1"):
        (tmp_path / name).mkdir()
        for key, file in (("VOCAB", "vocab.json"), ("MERGES", "merges.txt")):
            shutil.copy(prompts[f"MAGICPROMPT_{key}"], tmp_path / name / file)
    file = tmp_path / "words-other-1/vocab.json"
    ids = json.loads(file.read_text())
    file.write_text(json.dumps(ids | {"a": ids["b"], "b": ids["a"]}))
    return tmp_path


@pytest.mark.release
@pytest.mark.parametrize("names", [("main", "monarch", "vit"), ("libai", "llama")], ids="-".join)
def test_all_go_on_from_one_checkpoint_or_none_does(
    folder: Path,
    environment: dict[str, str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    names: Sequence[str],
) -> None:
    data, asked = list(folder.iterdir()), []
    for name in names:
        own = folder / name
        own.mkdir()
        for entry in data:
            (own / entry.name).symlink_to(entry)
        asked += lines(SYSTEMS[name], own)
        if name == "libai":
            asked += generated(own)
    command = several_runs([words for words, _ in asked], "on")
    result = run_distributed(command, 2, timeout=300, env=environment, cwd=PROJECTS)
    texts = [line.removeprefix("ended: ") for line in result.stdout.splitlines()]
    ends = [json.loads(text) for text in texts if text.startswith('{"line"')]
    assert len(ends) == 2 * len(asked), result.stdout[-5000:]
    for end in ends:
        words, said = asked[end["line"]]
        assert (end["code"], said in end["said"]) == (2 if said else 0, True), (words, end)
    for name in names:
        own, log = folder / name, libai_losses if "libai" in names else losses
        assert list(log(own / "first-0")) == [1, 2, 3, 4]
        if "libai" in names:
            # The first process writes for all.
            assert not list(own.glob("first-1/checkpoints/step-*"))
            continue
        for rank in (0, 1):
            files = {path.name for path in own.glob(f"cut-{rank}/checkpoints/*/*")}
            assert files == {f"shard-{rank:05d}-of-00002.safetensors", "state.json"}
    if "main" in names:
        assert_main_went_on(folder / "main", capsys)


def assert_main_went_on(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = losses(own / "whole")
    assert losses(own / "first-0") == whole
    assert [losses(own / f"{out}-0")[4] for out in ("second", "steps")] == [whole[4]] * 2
    assert losses(own / "cut-0") == losses(own / "cut")
    # One process needs all shards on its machine.
    newest, theirs = (max(own.glob(f"cut-{rank}/checkpoints/step-*")) for rank in (0, 1))
    put_together = ["--ckpt_prefix", str(newest)]
    assert consolidate.main(put_together) == 2
    assert f"shard-00001-of-00002.safetensors {MISSING}" in capsys.readouterr().err
    shutil.copy(next(theirs.glob("shard-*")), newest)
    assert consolidate.main(put_together) == 0
