"""Reading files in blocks gives every line once, with its number, whatever the block size."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from oneflow_accel.errors import DataError

import pytest

from libai_projects.text.corpus import LineBlock, check_files, is_jsonl, read_blocks


def lines_of(block: LineBlock) -> list[tuple[int, int, bytes, bool]]:
    lines = [block.data] if block.too_long else block.data.removesuffix(b"\n").split(b"\n")
    assert len(lines) == block.lines
    return [
        (block.file, block.first_line + place, line, block.too_long)
        for place, line in enumerate(lines)
    ]


def test_any_file_in_any_block_size(tmp_path: Path) -> None:
    draw = random.Random(0)
    limit = 30
    for _ in range(200):
        count = draw.randrange(12)
        lines = [b"x" * draw.choice([0, 1, 5, 29, 30, 31, 90]) for _ in range(count)]
        data = b"\n".join(lines) + draw.choice([b"", b"\n"])
        path = tmp_path / "text.txt"
        path.write_bytes(data)
        expected = data.removesuffix(b"\n").split(b"\n") if data else []
        found = []
        for block in read_blocks([path], max_line_bytes=limit, block_bytes=draw.randrange(1, 60)):
            found += lines_of(block)
        assert [(line[:limit], len(line) > limit) for line in expected] == [
            (line, too_long) for _, _, line, too_long in found
        ]
        assert [number for _, number, _, _ in found] == list(range(1, len(expected) + 1))


def test_several_files_a_mark_and_gzip(tmp_path: Path) -> None:
    plain, zipped, last = (tmp_path / name for name in ("a.txt", "b.jsonl.gz", "c.ndjson"))
    plain.write_bytes(b"\xef\xbb\xbfone\ntwo")
    zipped.write_bytes(gzip.compress(b"three\n" * 50))
    last.write_bytes(b"")
    blocks = list(read_blocks([plain, zipped, last], block_bytes=64))
    lines = [line for block in blocks for line in lines_of(block)]
    assert lines[:2] == [(0, 1, b"one", False), (0, 2, b"two", False)]
    assert lines[2:] == [(1, number, b"three", False) for number in range(1, 51)]
    assert {(block.path, block.jsonl) for block in blocks} == {
        (str(plain), False),
        (str(zipped), True),
    }
    assert blocks[-1].position == zipped.stat().st_size
    assert all(block.jsonl for block in read_blocks([plain], jsonl=True))


def test_names_that_say_json_lines() -> None:
    assert all(map(is_jsonl, map(Path, ["a.jsonl", "a.JSONL.gz", "a.ndjson", "a.json"])))
    assert not any(map(is_jsonl, map(Path, ["a.txt", "a.gz", "jsonl", "a.jsonl.txt"])))


def test_what_cannot_be_read_is_said_beforehand(tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("a prompt", encoding="utf-16")
    (tmp_path / "fine.txt").write_text("a prompt")
    check_files([tmp_path / "fine.txt"])
    for name, message in [
        ("none.txt", "none.txt does not exist"),
        (".", "is a directory; name the text files in it"),
        ("wide.txt", "wide.txt is UTF-16 or UTF-32 text; convert it with `iconv"),
    ]:
        with pytest.raises(DataError, match=message):
            check_files([tmp_path / "fine.txt", tmp_path / name])


@pytest.mark.parametrize("cut", [0.5, 0.99])
def test_a_truncated_gzip_file_is_an_error(cut: float, tmp_path: Path) -> None:
    whole = gzip.compress(random.Random(0).randbytes(100_000))
    path = tmp_path / "text.txt.gz"
    path.write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(DataError, match=r"text.txt.gz: its gzip data is truncated or damaged"):
        list(read_blocks([path]))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"text.txt.gz: its gzip data is truncated or damaged"):
        list(read_blocks([path]))
