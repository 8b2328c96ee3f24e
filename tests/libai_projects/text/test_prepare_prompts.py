"""prepare.py: a text file to a dataset in one command."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from libai_projects.text import corpus
from libai_projects.text.indexed_dataset import MMapTokenDataset
from libai_projects.text.prepare import main
from libai_projects.text.tokenizer import GPT2Tokenizer
from tests.launch import REPOSITORY, run_process
from tests.libai_projects.text.conftest import PROMPTS, VocabularyFiles

SCRIPT = REPOSITORY / "libai_projects" / "projects" / "MagicPrompt" / "prepare.py"


def prompts_in(prefix: Path, tokenizer: GPT2Tokenizer) -> list[str]:
    dataset = MMapTokenDataset(prefix, tokenizer.vocab_size)
    return [tokenizer.decode(ids, skip_special=False) for ids in dataset]


def prepare(small_files: VocabularyFiles, *options: str | Path) -> int:
    return main([*map(str, options), *small_files.options, "--workers", "1"])


def test_one_command_from_text_to_dataset(
    gpt2: GPT2Tokenizer, gpt2_files: VocabularyFiles, sd_prompts: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "train" / "prompts"
    environment = {
        "MAGICPROMPT_DATA": str(prefix),
        "MAGICPROMPT_VOCAB": gpt2_files.vocab,
        "MAGICPROMPT_MERGES": gpt2_files.merges,
    }
    done = run_process([SCRIPT, sd_prompts], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    lines = sd_prompts.read_text(encoding="utf-8").split("\n")[:-1]
    dataset = MMapTokenDataset(prefix, gpt2.vocab_size)
    assert [ids.tolist() for ids in dataset] == [[*gpt2.encode(line), 50256] for line in lines]
    assert dataset.dtype == "<u2"
    assert "764 lines: 0 empty, 0 bad" in done.stdout
    assert f"764 documents, {dataset.tokens:,} tokens" in done.stdout
    longest = int(dataset.sizes.argmax())
    assert f"longest: {dataset.sizes[longest]} tokens, {sd_prompts}:{longest + 1}" in done.stdout
    ordered = sorted(dataset.sizes)
    # The nearest-rank percentile: of 764, the 382nd and the 757th.
    assert f"50 %: {ordered[381]}, " in done.stdout
    assert f"99 %: {ordered[756]}" in done.stdout


AWKWARD = (
    b"\xef\xbb\xbffirst after a mark\r\n"
    b"\n"
    b" \t \r\n"
    b"M\xfcnchen in Latin-1\n"
    b' leading "quotes" and \\ kept  \n'
    b"a NUL \x00 inside\n"
    b"\xe2\x80\xa8 and \x0c and \xc2\x85 end no line\n"
    b"<|endoftext|> is text\n" + b"long " * 100 + b"\n"
    b"the last, without a newline"
)
AWKWARD_KEPT = [
    "first after a mark",
    ' leading "quotes" and \\ kept  ',
    "\u2028 and \x0c and \x85 end no line",
    "<|endoftext|> is text",
    "the last, without a newline",
]


def test_awkward_lines(
    small: GPT2Tokenizer,
    small_files: VocabularyFiles,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "prompts.txt"
    text.write_bytes(AWKWARD)
    report = tmp_path / "report.json"
    options = [text, "--output-prefix", tmp_path / "data", "--max-line-bytes", "300"]
    assert prepare(small_files, *options, "--report", report) == 0
    assert prompts_in(tmp_path / "data", small) == [f"{p}<|endoftext|>" for p in AWKWARD_KEPT]
    # The text that spells the special token is encoded as text.
    assert small.eod_token_id not in MMapTokenDataset(tmp_path / "data")[3][:-1]
    output = capsys.readouterr().out
    assert "10 lines: 2 empty, 3 bad" in output
    assert f"bad: {text}:4: not UTF-8 (byte 2 of the line)" in output
    assert f"bad: {text}:6: has a NUL character" in output
    assert f"bad: {text}:9: longer than --max-line-bytes" in output
    counts = json.loads(report.read_text())[0]
    assert (counts["lines"], counts["empty"], counts["bad"]) == (10, 2, 3)
    assert counts["outputs"]["train"]["documents"] == 5

    options = [text, "--output-prefix", tmp_path / "bare", "--max-line-bytes", "300"]
    assert prepare(small_files, *options, "--no-append-eod", "--strip") == 0
    assert prompts_in(tmp_path / "bare", small) == [prompt.strip() for prompt in AWKWARD_KEPT]


def test_bad_lines_can_be_an_error(
    small_files: VocabularyFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "prompts.txt"
    text.write_bytes(AWKWARD)
    options = [text, "--output-prefix", tmp_path / "data", "--bad-lines", "error"]
    assert prepare(small_files, *options) == 2
    error = capsys.readouterr().err
    assert f"prepare.py: error: {text}:4: not UTF-8 (byte 2 of the line). Mend the line" in error
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_json_lines_and_gzip(
    small: GPT2Tokenizer,
    small_files: VocabularyFiles,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "prompts.jsonl.gz"
    lines = [json.dumps({"prompt": prompt, "other": 1}) for prompt in PROMPTS]
    lines += ["", '{"prompt": " "}', '{"prompt": "two\\nlines"}']
    bad = ["{", "[1]", '{"text": "x"}', '{"prompt": 3}', '{"prompt": "\\ud800"}', "[" * 20_000]
    source.write_bytes(gzip.compress("\n".join(lines + bad).encode()))
    options = [source, "--output-prefix", tmp_path / "data", "--json-key", "prompt"]
    assert prepare(small_files, *options, "--no-append-eod") == 0
    assert prompts_in(tmp_path / "data", small) == [*PROMPTS, "two\nlines"]
    output = capsys.readouterr().out
    assert "15 lines: 2 empty, 6 bad" in output
    reasons = ["not JSON: .*", "a JSON list, not an object", "has no key 'prompt'; it has 'text'"]
    reasons += ["key 'prompt' is a int, not a text", "key 'prompt' has half a surrogate pair"]
    for number, reason in enumerate([*reasons, "JSON nested too deeply"], start=10):
        found = [line for line in output.split("\n") if f"jsonl.gz:{number}: " in line]
        assert len(found) == 1
        assert reason.split(".*")[0] in found[0]


def test_validation_from_a_file_and_as_a_share(
    small: GPT2Tokenizer, small_files: VocabularyFiles, tmp_path: Path
) -> None:
    train, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    # Each prompt three times, far from each other.
    prompts = [f"prompt number {number % 300}" for number in range(900)]
    train.write_text("\n".join(prompts))
    valid.write_text("\n".join(PROMPTS))
    options = ["--output-prefix", tmp_path / "a", "--no-append-eod"]
    assert prepare(small_files, train, *options, "--validation", valid) == 0
    assert prompts_in(tmp_path / "a", small) == prompts
    assert prompts_in(tmp_path / "a_valid", small) == PROMPTS

    options = ["--output-prefix", tmp_path / "b", "--no-append-eod", "--validation", "0.2"]
    assert prepare(small_files, train, *options) == 0
    kept, held = prompts_in(tmp_path / "b", small), prompts_in(tmp_path / "b_valid", small)
    assert sorted(kept + held) == sorted(prompts)
    assert not set(kept) & set(held)
    assert 120 <= len(held) <= 240
    train.write_text("\n".join(reversed(prompts)))
    assert prepare(small_files, train, *options, "--overwrite") == 0
    assert prompts_in(tmp_path / "b_valid", small) == held[::-1]
    assert prepare(small_files, train, *options, "--overwrite", "--seed", "1") == 0
    assert set(prompts_in(tmp_path / "b_valid", small)) != set(held)


def test_many_lines_in_several_processes(
    gpt2: GPT2Tokenizer, gpt2_files: VocabularyFiles, tmp_path: Path
) -> None:
    draw = random.Random(0)
    words = [b"portrait", b"of", b"a", b"castle,", b"oil", b"8 k", b"artstation", b"trending"]
    text = tmp_path / "prompts.txt"
    with text.open("wb") as file:
        for number in range(12_000):
            if number == 5_678:
                file.write(b"bad \xff\n")
            elif number % 1000 == 7:
                file.write(b"\r\n")
            else:
                file.write(b"%d " % number + b" ".join(draw.choices(words, k=3)) + b"\r\n")
    found = {}
    for workers in ("1", "3"):
        prefix = tmp_path / f"data{workers}"
        report = tmp_path / f"report{workers}.json"
        options = ["--output-prefix", prefix, "--report", report, *gpt2_files.options]
        assert main([str(text), *map(str, options), "--workers", workers]) == 0
        counts = json.loads(report.read_text())[0]
        assert (counts["lines"], counts["empty"], counts["bad"]) == (12_000, 12, 1)
        assert counts["first_bad"] == [f"{text}:5679: not UTF-8 (byte 5 of the line)"]
        found[workers] = [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert found["1"] == found["3"]
    dataset = MMapTokenDataset(tmp_path / "data3", gpt2.vocab_size)
    assert len(dataset) == 11_987
    assert gpt2.decode(dataset[-1 + len(dataset)]).startswith("11999 ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.txt"], "input file none.txt does not exist"),
        (["p.txt", "--validation", "1.5"], "--validation 1.5: a share is between 0 and 1"),
        (["p.txt", "--validation", "0.000001"], "of 6 prompts none is left for data_valid"),
        (["empty.txt"], "there is no text in empty.txt: 3 lines, all empty"),
        (["bad.txt"], "of 2 lines 0 are empty and 2 bad, the first bad.txt:1: not UTF-8"),
        (
            ["p.txt", "image.png"],
            "image.png is not text: 2 of its 3 lines are bad, such as image.png:1",
        ),
        (["p.txt", "--output-prefix", "old"], "old.bin exist already; --overwrite"),
        (["p.txt", "--report", "no/report.json"], "the datasets are made, but --report"),
    ],
)
def test_what_the_user_can_mend(
    options: list[str],
    message: str,
    small_files: VocabularyFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("\n".join(PROMPTS))
    Path("empty.txt").write_text("\n \n\n")
    Path("bad.txt").write_bytes(b"\xff\n\xfe")
    # One of its lines could be text.
    Path("image.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xd8IDAT")
    Path("old.bin").touch()
    before = sorted(tmp_path.iterdir())
    options = [*small_files.options, "--output-prefix", "data", *options]
    assert main(options) == 2
    assert message in capsys.readouterr().err
    if "--report" not in options:
        assert sorted(tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that takes much longer than the first blocks of it."""
    path = tmp_path_factory.mktemp("many") / "many.txt"
    path.write_text("a prompt of some words\n" * 600_000)
    return path


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_the_old_dataset(
    how: signal.Signals,
    small: GPT2Tokenizer,
    small_files: VocabularyFiles,
    many: Path,
    tmp_path: Path,
) -> None:
    few = tmp_path / "few.txt"
    few.write_text("\n".join(PROMPTS))
    prefix = tmp_path / "data"
    assert prepare(small_files, few, "--output-prefix", prefix) == 0
    options = ["--output-prefix", str(prefix), "--overwrite", *small_files.options]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(many), *options, "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    part = tmp_path / "data.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    if how is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "prepare.py: stopped; unfinished files were taken away" in errors
        assert not part.exists()
    assert prompts_in(prefix, small) == [f"{prompt}<|endoftext|>" for prompt in PROMPTS]
    assert prepare(small_files, few, "--output-prefix", prefix, "--overwrite") == 0
    assert not part.exists()


def test_a_killed_worker_is_an_error(
    small_files: VocabularyFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def killed(*_: object) -> object:
        os.kill(os.getpid(), signal.SIGKILL)

    text = tmp_path / "prompts.txt"
    text.write_text("\n".join(PROMPTS))
    monkeypatch.setattr("libai_projects.text.corpus.BlockEncoder.__call__", killed)
    options = [str(text), "--output-prefix", str(tmp_path / "data"), *small_files.options]
    assert main([*options, "--workers", "2"]) == 2
    assert "was killed by SIGKILL. If the machine ran out of memory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_log_file_gets_lines_of_progress(
    small_files: VocabularyFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(corpus, "_LOG_SECONDS", 0.0)
    text = tmp_path / "prompts.txt"
    text.write_text("a cute pig\n" * 30_000)
    assert prepare(small_files, text, "--output-prefix", tmp_path / "data") == 0
    lines = [line for line in capsys.readouterr().out.split("\n") if " lines/s, " in line]
    assert len(lines) > 2
    assert " MB/s, ETA 0:00:0" in lines[1]
