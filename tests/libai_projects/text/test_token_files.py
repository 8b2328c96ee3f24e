"""Windows of raw token files, and prepare.py, which makes such files of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oneflow_accel.errors import DataError, UserError

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from libai_projects.text import indexed_dataset
from libai_projects.text.loaders import TokenFiles
from libai_projects.text.prepare import main
from libai_projects.text.token_files import (
    Description,
    TokenWindows,
    describe,
    files_of,
    held_out,
)
from libai_projects.text.tokenizer import open_tokenizer
from tests.launch import REPOSITORY, run_process
from tests.libai_projects.text.conftest import PROMPTS

SCRIPT = REPOSITORY / "libai_projects" / "projects" / "Llama" / "prepare.py"
END = 7


def write(file: Path, ids: Any, dtype: str = "uint16", **said: Any) -> str:
    """A token file, and the .json beside it where there is something that it says."""
    ids = np.asarray(ids)
    ids.astype(dtype).tofile(file)
    if said:
        said = {"tokens": len(ids), "documents": 1, "vocab_size": 100, "tokenizer": "t", **said}
        file.with_suffix(".json").write_text(json.dumps({"dtype": dtype, **said}))
    return str(file)


def all_of(windows: TokenWindows) -> list[list[int]]:
    return [windows.window(index).tolist() for index in range(len(windows))]


@pytest.mark.parametrize(("tokens", "count"), [(101, 10), (100, 9), (11, 1)])
def test_windows_share_one_token_and_the_rest_is_left_out(
    tmp_path: Path, tokens: int, count: int
) -> None:
    windows = TokenWindows(write(tmp_path / "a.bin", np.arange(tokens)), 10)
    assert len(windows) == count == (tokens - 1) // 10
    assert all_of(windows) == [list(range(10 * i, 10 * i + 11)) for i in range(count)]
    inputs, labels, segments = windows[count - 1]
    assert inputs.dtype == labels.dtype == np.int64
    assert inputs.tolist() == list(range(10 * count - 10, 10 * count))
    assert labels.tolist() == [token + 1 for token in inputs]
    assert segments is None
    with pytest.raises(IndexError):
        windows[count]


def test_several_files_follow_their_names(tmp_path: Path) -> None:
    write(tmp_path / "c.bin", np.arange(200, 231))
    write(tmp_path / "a.bin", np.arange(25))
    # Less than a window, and nothing at all.
    write(tmp_path / "b.bin", np.arange(100, 110))
    write(tmp_path / "d.bin", [])
    write(tmp_path / "c_valid.bin", np.arange(300, 331))
    (tmp_path / "notes.txt").write_text("none of them")
    starts = [0, 10, 200, 210, 220]
    expected = [list(range(start, start + 11)) for start in starts]
    # No window crosses from a file to the next.
    assert all_of(TokenWindows(str(tmp_path), 10)) == expected
    assert all_of(TokenWindows(str(tmp_path / "*.bin"), 10)) == expected
    assert all_of(TokenWindows(str(tmp_path / "*"), 10)) == expected
    assert all_of(TokenWindows(str(tmp_path / "[ab].bin"), 10)) == expected[:2]
    assert all_of(TokenWindows(str(tmp_path / "c.bin"), 10)) == expected[2:]
    held = held_out(str(tmp_path))
    assert [file.name for file in files_of(held)] == ["c_valid.bin"]
    assert len(TokenWindows(held, 10)) == 3


def test_what_is_held_out_beside_files(tmp_path: Path) -> None:
    folder = tmp_path / "tokens [1]"
    folder.mkdir()
    file = write(folder / "v1.2.bin", range(20))
    for path in (file, str(folder), str(tmp_path / "*" / "*.bin")):
        assert held_out(path) is None
        assert files_of(path) == [Path(file)]
    valid = Path(write(folder / "v1.2_valid.bin", range(20)))
    for path in (file, str(folder), str(tmp_path / "*" / "*.bin")):
        assert files_of(path) == [Path(file)]
        assert files_of(held_out(path)) == [valid]
    # Who names it, means it.
    assert files_of(str(valid)) == [valid]
    assert held_out(str(valid)) is None


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    ids = np.arange(31) + (70_000 if dtype == "uint32" else 65_500)
    path = write(tmp_path / "a.bin", ids, dtype)
    windows = TokenWindows(path, 10, 70_031, dtype)
    assert np.concatenate([windows[i][0] for i in range(3)]).tolist() == ids[:30].tolist()
    # The .json counts more than what is asked for.
    write(tmp_path / "a.bin", ids, dtype, vocab_size=70_031)
    for asked in ("uint16", "uint32"):
        assert all_of(TokenWindows(path, 10, dtype=asked)) == all_of(windows)
    assert describe(path) == Description(dtype, 31, 1, 70_031, "t")


def test_files_of_the_wrong_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(50))
    Path(path).write_bytes(Path(path).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"a\.bin has 99 bytes, and a multiple of 2 are expected"):
        TokenWindows(path, 10)
    # Cut between two tokens, which only the .json tells.
    path = write(tmp_path / "a.bin", range(50), eod_id=END)
    Path(path).write_bytes(Path(path).read_bytes()[:-2])
    with pytest.raises(DataError, match="has 98 bytes, and 50 of 2 are expected for uint16: it is"):
        TokenWindows(path, 10)
    Path(path).with_suffix(".json").unlink()
    with pytest.raises(DataError, match=r"has 98 bytes, and a multiple of 4 .* of another dtype"):
        TokenWindows(path, 10, dtype="uint32")


def test_ids_that_the_model_has_not(tmp_path: Path) -> None:
    ids = np.arange(100)
    path = write(tmp_path / "a.bin", ids)
    assert len(TokenWindows(path, 10, 100)) == 9
    with pytest.raises(DataError, match=r"a\.bin: token 99 has the id 99, .* ends at 98"):
        TokenWindows(path, 10, 99)
    ids[[40, 61]] = 60_000
    write(tmp_path / "b.bin", ids)
    with pytest.raises(DataError, match=r"b\.bin: token 40 has the id 60000, .* ends at 99: give"):
        TokenWindows(str(tmp_path), 10, 100)


def test_a_large_file_is_looked_at_in_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pieces of eight tokens, which begin evenly spread from the first to the last."""
    monkeypatch.setattr(indexed_dataset, "_PIECE", 8)
    monkeypatch.setattr(indexed_dataset, "_PIECES_TO_CHECK", 4)
    for at in (0, 7, 32, 39, 64, 71, 96, 103):
        ids = np.zeros(104)
        ids[at] = 9
        with pytest.raises(DataError, match=f"token {at} has the id 9"):
            TokenWindows(write(tmp_path / "a.bin", ids), 10, 9)
    ids = np.zeros(104)
    ids[20] = 9
    assert len(TokenWindows(write(tmp_path / "a.bin", ids), 10, 9)) == 10


def test_documents_are_told_apart(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(8, 100, 401)
    # Two ends in a row, one at a window's beginning, and one at its end.
    ids[[5, 6, 20, 39, 100, *draw.integers(120, 400, 30)]] = END
    windows = TokenWindows(write(tmp_path / "a.bin", ids, eod_id=END), 20, 100, packing="documents")
    plain = TokenWindows(str(tmp_path / "a.bin"), 20, 100)
    assert len(windows) == len(plain) == 20
    for index in range(20):
        inputs, labels, segments = windows[index]
        assert segments.dtype == labels.dtype == np.int64
        assert inputs.tolist() == plain[index][0].tolist()
        number, numbers, expected = 0, [], []
        for token, after in zip(inputs, plain[index][1], strict=True):
            numbers.append(number)
            # A document's last token says nothing of the next one's first.
            expected.append(-100 if token == END else after)
            number += token == END
        assert segments.tolist() == numbers
        assert labels.tolist() == expected
    assert windows[0][2].tolist() == [0] * 6 + [1] + [2] * 13
    assert windows[1][2].tolist() == [0] + [1] * 19
    assert (windows[1][1] == -100).nonzero()[0].tolist() == [0, 19]


def test_documents_need_to_know_what_ends_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", range(50))
    with pytest.raises(DataError, match=r"no \.json that says which token ends a document.*stream"):
        TokenWindows(path, 10, packing="documents")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "uint61"}, "token files of dtype 'uint61': did you mean uint16?"),
        ({"packing": "none"}, "of packing 'none': there are stream, documents"),
    ],
)
def test_wrong_names(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        TokenWindows(write(tmp_path / "a.bin", range(50)), 10, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("content", ["{", "null", '{"dtype": "uint16"}', "\xff"])
def test_damaged_descriptions(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "a.bin", range(50))
    (tmp_path / "a.json").write_text(content, encoding="latin-1")
    for read in (describe, lambda path: TokenWindows(path, 10)):
        with pytest.raises(DataError, match=r"a\.json does not describe a token file \("):
            read(path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"dtype": "float32"}, "its dtype is 'float32', and not one of uint16, uint32"),
        ({"tokens": "50"}, "its tokens is '50', and not a whole number"),
        ({"eod_id": 2.5}, "its eod_id is 2.5"),
    ],
)
def test_descriptions_of_wrong_types(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.bin", range(50), **{"eod_id": END, **said})
    with pytest.raises(DataError) as error:
        TokenWindows(path, 10)
    assert message in str(error.value)
    assert "a.json" in str(error.value)


def test_missing_and_short_files(tmp_path: Path) -> None:
    for path in ("none.bin", "none", "*.bin", "."):
        with pytest.raises(DataError, match=r"there is no token file at '.*': name a \.bin"):
            TokenWindows(str(tmp_path / path), 10)
    # All that is held out is not for training.
    write(tmp_path / "a_valid.bin", range(50))
    with pytest.raises(DataError, match="there is no token file at"):
        files_of(str(tmp_path))
    write(tmp_path / "a.bin", range(10))
    write(tmp_path / "b.bin", [])
    with pytest.raises(DataError, match="has 10 tokens in 2 files, and one sequence takes 11: add"):
        TokenWindows(str(tmp_path), 10)


def test_as_a_dataset_of_libai(tmp_path: Path) -> None:
    ids = np.arange(8, 58)
    ids[4] = END
    path = write(tmp_path / "a.bin", ids, eod_id=END)
    plain = TokenFiles(path, 10, tokenizer=None)
    assert len(plain) == 4
    fields = plain[np.int64(1)].get_fields()
    assert set(fields) == {"input_ids", "labels"}
    assert fields["input_ids"].tensor.numpy().tolist() == ids[10:20].tolist()
    assert fields["labels"].tensor.numpy().tolist() == ids[11:21].tolist()
    # Labels are for the last stage of a pipeline.
    assert fields["labels"].placement_idx == -1
    packed = TokenFiles(path=path, max_seq_length=10, packing="documents")[0].get_fields()
    assert packed["segments"].tensor.numpy().tolist() == [0] * 5 + [1] * 5
    assert packed["labels"].tensor.numpy().tolist()[3:6] == [END, -100, ids[6]]


def test_prepare_with_a_tokenizer_of_hugging_face(byte_level: Path, tmp_path: Path) -> None:
    """As a user types it, text and JSON lines at once."""
    (tmp_path / "a.txt").write_text("\n".join(PROMPTS[:3]), encoding="utf-8")
    lines = [json.dumps({"text": text}) + "\n" for text in [*PROMPTS[3:], "two\nlines"]]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    file = byte_level / "tokenizer.json"
    prefix = tmp_path / "out" / "v1.2"
    command = [SCRIPT, "a.txt", "b.jsonl", "--output-prefix", prefix, "--tokenizer", file]
    done = run_process([*command, "--workers", "1"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    library = tokenizers.Tokenizer.from_file(str(file))
    texts = [*PROMPTS, "two\nlines"]
    ids = [[*library.encode(text, add_special_tokens=False).ids, 1] for text in texts]
    expected = np.concatenate(ids)
    assert np.fromfile(f"{prefix}.bin", "<u2").tolist() == expected.tolist()
    assert json.loads(Path(f"{prefix}.json").read_text()) == {
        "dtype": "uint16",
        "tokens": len(expected),
        "documents": len(texts),
        "vocab_size": 300,
        "tokenizer": str(file),
        "eod_id": 1,
        # The file has one, but what is beside it does not say that it pads.
        "pad_id": None,
    }
    assert Path(f"{prefix}.idx").is_file()
    assert "ids of 16 bits: 300 tokens, which a Llama pads to 304; documents end with 1" in (
        done.stdout
    )
    tokenizer = open_tokenizer(file)
    windows = TokenWindows(f"{prefix}.bin", 16, 300, packing="documents")
    assert len(windows) == (len(expected) - 1) // 16
    tokens = [token for inputs, _, _ in windows for token in inputs]
    text = "".join(f"{text}<|end_of_text|>" for text in texts)
    decoded = tokenizer.decode(tokens, skip_special=False)
    assert text.startswith(decoded.rstrip("\ufffd"))
    assert tokenizer.decode(expected, skip_special=False) == text
    # What is left out is less than a window.
    assert len(expected) - len(tokens) <= 16


def test_prepare_with_a_model_of_sentencepiece(model_file: Path, tmp_path: Path) -> None:
    # Equal prompts are held out together.
    prompts = [f"{prompt}, number {n}" for n in range(20) for prompt in PROMPTS]
    (tmp_path / "a.txt").write_text("\n".join(prompts), encoding="utf-8")
    options = ["--tokenizer", str(model_file.parent), "--workers", "1", "--validation", "0.4"]
    prefix = tmp_path / "tokens"
    assert main([str(tmp_path / "a.txt"), "--output-prefix", str(prefix), *options]) == 0
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    found = []
    for path in (f"{prefix}.bin", held_out(f"{prefix}.bin")):
        said = describe(path)
        assert (said.vocab_size, said.eod_id, said.pad_id) == (330, 2, 3)
        ids = np.fromfile(path, "<u2")
        assert said.tokens == len(ids)
        ends = np.flatnonzero(ids == 2) + 1
        assert said.documents == len(ends)
        found += [library.decode(each[:-1].tolist()) for each in np.split(ids, ends)[:-1]]
    assert sorted(found) == sorted(prompts)
    assert [file.name for file in files_of(str(tmp_path))] == ["tokens.bin"]


def test_prepare_with_a_large_vocabulary(tmp_path: Path) -> None:
    """Of 65,600 tokens, the last of which is a word of the text; no token ends a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|end_of_text|>", *alphabet, *(f"filler {number}" for number in range(65_600 - 258))]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={name: id for id, name in enumerate([*names, "ab"])}, merges=[("a", "b")])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab\nabab\n")
    options = ["--tokenizer", str(tmp_path), "--workers", "1", "--no-append-eod"]
    path = tmp_path / "tokens.bin"
    command = [str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "tokens"), *options]
    assert main(command) == 0
    said = describe(str(path))
    assert (said.dtype, said.eod_id) == ("uint32", None)
    expected = [[65_599] * 3]
    assert np.fromfile(path, "<u4").tolist() == expected[0]
    assert all_of(TokenWindows(str(path), 2, 65_600)) == expected
    with pytest.raises(DataError, match="which token ends a document"):
        TokenWindows(str(path), 2, packing="documents")
    # Without the .json, the .idx tells the dtype.
    (tmp_path / "tokens.json").unlink()
    assert all_of(TokenWindows(str(path), 2, 65_600, dtype="uint16")) == expected


def test_the_config_of_an_older_run_finds_its_data_set() -> None:
    from libai.config import instantiate
    from omegaconf import OmegaConf

    node = {"_target_": "libai_projects.engine.data.RandomTokens", "vocab_size": 9}
    made = instantiate(OmegaConf.create({**node, "max_seq_length": 4, "samples": 3}))
    assert len(made) == 3
    assert made[0].get("input_ids").tensor.shape == (4,)
