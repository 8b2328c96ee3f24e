"""Vocabulary files that are missing, damaged or wrong are errors that say which and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from oneflow_accel.errors import UserError

import pytest

from libai_projects.text.tokenizer import GPT2Tokenizer, load_vocabulary
from tests.libai_projects.text.conftest import VocabularyFiles

Change = Callable[[Path, Path], object]


def _json(change: Callable[[dict[str, int]], object]) -> Change:
    def apply(vocab: Path, merges: Path) -> None:
        ids = json.loads(vocab.read_text())
        vocab.write_text(json.dumps(change(ids)))

    return apply


def _without(*tokens: str) -> Change:
    """Take tokens out and close the gaps in the ids."""

    def change(ids: dict[str, int]) -> dict[str, int]:
        left = [token for token in sorted(ids, key=ids.__getitem__) if token not in tokens]
        return {token: place for place, token in enumerate(left)}

    return _json(change)


def _swap(vocab: Path, merges: Path) -> None:
    other = vocab.read_bytes()
    vocab.write_bytes(merges.read_bytes())
    merges.write_bytes(other)


def _cut(which: int, keep: float) -> Change:
    def apply(*paths: Path) -> None:
        data = paths[which].read_bytes()
        paths[which].write_bytes(data[: int(len(data) * keep)])

    return apply


def _last_merges_away(vocab: Path, merges: Path) -> None:
    merges.write_text("\n".join(merges.read_text().split("\n")[:-6]) + "\n")


CASES: dict[str, tuple[Change, str]] = {
    "no vocabulary": (lambda v, m: v.unlink(), "vocab.json does not exist.*MAGICPROMPT_VOCAB"),
    "no merges": (lambda v, m: m.unlink(), "merges.txt does not exist.*--merges-file"),
    "wrong way round": (_swap, "in the other's place"),
    "cut vocabulary": (_cut(0, 0.5), "cannot be read.* truncated"),
    "merges cut at a line": (_last_merges_away, "nothing makes 5 of the tokens.*truncated"),
    "merges cut in a line": (_cut(1, 0.5), "merges.txt.*truncated"),
    "binary": (lambda v, m: v.write_bytes(b"\xff\xd8\xff\xe0"), "another kind of file"),
    "list": (_json(list), "another kind of file"),
    "tokenizer.json": (_json(lambda ids: {"model": {"vocab": ids}}), "vocab.json"),
    "ids with a gap": (_json(lambda ids: {**ids, "x y": 400}), "are not 0 .. 300, each once"),
    "CLIP": (_json(lambda ids: {**ids, "a</w>": 300}), "as CLIP"),
    "no bytes": (_without("Ā"), "has no token 'Ā'"),
    "no end of text": (_without("<|endoftext|>"), r"has no token '<\|endoftext\|>'"),
    "no merge": (
        lambda v, m: m.write_text(m.read_text() + "one two three\n"),
        r"line \d+.*truncated",
    ),
    "unknown merge": (lambda v, m: m.write_text(m.read_text() + "! !\n"), "`!!` out of vocab"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_files_are_user_errors(
    case: str, small_files: VocabularyFiles, tmp_path: Path
) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    shutil.copy(small_files.vocab, vocab)
    shutil.copy(small_files.merges, merges)
    change, message = CASES[case]
    change(vocab, merges)
    with pytest.raises(UserError, match=message):
        GPT2Tokenizer(str(vocab), str(merges))


def test_windows_line_ends_and_special_tokens_are_fine(
    small_files: VocabularyFiles, tmp_path: Path
) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    ids = json.loads(Path(small_files.vocab).read_text())
    vocab.write_text(json.dumps({**ids, "<|pad|>": 300}))
    merges.write_bytes(Path(small_files.merges).read_bytes().replace(b"\n", b"\r\n"))
    found, pairs = load_vocabulary(vocab, merges)
    assert pairs == load_vocabulary(Path(small_files.vocab), Path(small_files.merges))[1]
    assert len(found) == 301


def test_gpt2_files_have_the_known_numbers(gpt2_files: VocabularyFiles) -> None:
    ids, merges = load_vocabulary(Path(gpt2_files.vocab), Path(gpt2_files.merges))
    assert (len(ids), len(merges)) == (50257, 50000)
