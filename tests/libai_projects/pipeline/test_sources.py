"""JSON lines and the terminal, in front of a fake model."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import TEXT, fake_pipeline

from libai_projects.inference.command import JsonLines, LivePrinter, Terminal
from libai_projects.inference.jobs import Worker
from libai_projects.inference.texts import Piece


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    running = Worker(fake_pipeline(tmp_path), queue_length=1)
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    running.close()
    thread.join(10)
    assert not thread.is_alive()


def answers(worker: Worker, lines: bytes, **settings: Any) -> tuple[list[dict], JsonLines]:
    written: list[dict] = []
    worker.engine.options = worker.engine.options.replace(max_new_tokens=5)
    reader = JsonLines(worker, written.append, **settings)
    reader.run(io.BytesIO(lines))
    return written, reader


def test_one_object_out_for_each_line_in(worker: Worker) -> None:
    lines = [
        b'{"id": "a", "prompt": "x"}',
        b"",
        b'{"id": {"n": 2}, "prompt": "x", "max_new_tokens": 3, "num_return_sequences": 2, '
        b'"do_sample": true}',
        b"nonsense",
        b"[1]",
        b'{"id": 5}',
        b'{"id": 6, "prompt": 7}',
        b'{"id": 7, "prompt": "x", "temperatures": 1}',
        b'{"id": 8, "prompt": "x", "top_p": 2}',
        b'{"id": 9, "prompt": "\\ud800"}',
        b'{"id": 10, "prompt": "' + b"x" * 600 + b'"}',
        b"\xff\xfe",
        b"[" * 100_000,
        '{"id": "ü", "prompt": "ü"}'.encode(),
        b'{"id": "ids", "prompt": [120, 121], "stop_strings": ["n a", "?"]}',
    ]
    written, reader = answers(worker, b"\n".join(lines))
    assert [answer["id"] for answer in written] == [
        "a", {"n": 2}, None, None, 5, 6, 7, 8, 9, 10, None, None, "ü", "ids"
    ]  # fmt: skip
    assert [answer["line"] for answer in written] == [1, *range(3, 16)]
    good = [answer for answer in written if "results" in answer]
    assert [answer["line"] for answer in good] == [1, 3, 14, 15]
    assert good[0]["results"] == [
        {"generated_text": "x" + TEXT[:5], "new_tokens": 5, "finish_reason": "length"}
    ]
    assert [result["new_tokens"] for result in good[1]["results"]] == [3, 3]
    assert good[2]["results"][0]["generated_text"].startswith("ü")
    stopped = {"generated_text": "xyin a", "new_tokens": 4, "finish_reason": "stop"}
    assert good[3]["results"] == [stopped]
    errors = {answer["line"]: answer["error"] for answer in written if "error" in answer}
    assert reader.bad == len(errors) == 10
    assert all("\n" not in text for text in errors.values())
    for line, words in {
        4: "not JSON",
        5: "not a JSON object",
        6: "'prompt' is missing",
        7: "'prompt' is not a text",
        8: "did you mean 'temperature'",
        9: "top_p",
        10: "surrogate",
        11: "positions",
        12: "not UTF-8",
        13: "JSON",
    }.items():
        assert words in errors[line], (line, errors[line])


def test_streamed_pieces_come_before_their_result(worker: Worker) -> None:
    written, _ = answers(worker, b'{"id": 1, "prompt": "x", "max_new_tokens": 40}\n', stream=True)
    *pieces, last = written
    assert len(pieces) > 20
    assert {(piece["id"], piece["index"]) for piece in pieces} == {(1, 0)}
    text = "".join(piece["text"] for piece in pieces)
    assert last["results"][0]["generated_text"] == "x" + text
    assert "möhren" in text
    assert "🐷" in text


def test_terminal(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    typed = iter(["x", "  ", "y" * 600, "z"])

    def ask(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", ask)
    worker.engine.options = worker.engine.options.replace(max_new_tokens=9)
    terminal = Terminal(worker, stream=True, new_seed=lambda: 1)
    assert not terminal.cancel()
    terminal.run()
    first, error, last, end = capsys.readouterr().out.splitlines()
    assert first == "x" + TEXT[:9]
    assert error.startswith("error: prompt 0 has 600 tokens")
    assert (last, end) == ("z" + TEXT[:9], "")


def test_live_printer_shows_the_first_text_as_it_comes(capsys: pytest.CaptureFixture) -> None:
    printer = LivePrinter("a")
    printer.feed(Piece(0, " b"))
    printer.feed(Piece(1, " x"))
    assert capsys.readouterr().out == "a b"
    printer.feed(Piece(0, " c"))
    printer.feed(Piece(0, "", finish_reason="eos"))
    printer.finish(["a b c", "a x"])
    assert capsys.readouterr().out == " c\n\na x\n"
    # Beam search brings no pieces.
    LivePrinter("a").finish(["a b"])
    assert capsys.readouterr().out == "a b\n"


def test_a_reader_that_goes_away_ends_the_job(worker: Worker) -> None:
    def write(_answer: Any) -> None:
        raise BrokenPipeError

    reader = JsonLines(worker, write)
    with pytest.raises(BrokenPipeError):
        reader.run(io.BytesIO(b'{"prompt": "x"}\n'))


def test_a_closed_worker_ends_the_reading(worker: Worker) -> None:
    worker.close()
    written, reader = answers(worker, b'{"prompt": "x"}\n')
    assert reader.bad == 0 or written[0]["error"] == "the server is shutting down"
