"""Where prompts come from besides a server: lines of JSON, or a person at a terminal.

Both read in a thread of their own on rank 0, so that the other ranks hear from rank 0 however long
the next line takes.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

from oneflow_accel.errors import UserError

from libai_projects.inference.engine import GeneratedText
from libai_projects.inference.jobs import ClosedError, Job, Problem, Worker
from libai_projects.inference.options import FOR_CALLERS

logger = logging.getLogger("oneflow_accel")

Write = Callable[[Mapping[str, Any]], None]
# Longest line of JSON. GPT-2's 1,024 positions hold at most some 130 kB.
MOST_LINE_BYTES = 2**20


def run_and_wait(
    worker: Worker,
    prompt: str,
    options: Mapping[str, Any],
    on_text: Callable[[int, str], None] | None = None,
    on_job: Callable[[Job | None], None] = lambda job: None,
) -> list[GeneratedText]:
    """Submit one prompt and wait for its texts; a refused request is a UserError, a closed
    worker ClosedError. For those who may cancel it, `on_job` is told the job before, and None at
    the end."""
    ended = threading.Event()
    outcome: list[Any] = []

    def on_end(texts: list[GeneratedText] | None, problem: Problem | None) -> None:
        outcome.extend([texts, problem])
        ended.set()

    job = Job([prompt], options, on_end, on_text)
    on_job(job)
    worker.submit(job, wait=True)
    ended.wait()
    on_job(None)
    texts, problem = outcome
    if texts is None:
        raise UserError(problem.message)
    return texts


class JsonLines:
    """One JSON object in for each line, one out, in the same order; `bad` counts the errors.

    In:  {"id": anything, "prompt": "a dog", "max_new_tokens": 20, ...}
    Out: {"id": ..., "line": 1, "results": [{"generated_text", "new_tokens", "finish_reason"}]}
    or:  {"id": ..., "line": 2, "error": "..."}
    before, with `stream`: {"id": ..., "line": 1, "index": 0, "text": " in"}
    """

    def __init__(
        self,
        worker: Worker,
        write: Write,
        options: Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
    ) -> None:
        self._worker = worker
        self._write = write
        self._options = dict(options or {})
        self._stream = stream
        self.bad = 0

    def run(self, file: BinaryIO) -> None:
        """Answer every line, whatever is in it; empty ones are skipped."""
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            # `_answer` fills the id in as soon as it has read it.
            head: dict[str, Any] = {"id": None, "line": number}
            try:
                outcome: dict[str, Any] = {"results": self._answer(line, head)}
            except ClosedError:
                return
            except Exception as error:
                self.bad += 1
                outcome = {"error": str(error)}
                if not isinstance(error, UserError):
                    logger.exception("line %d failed", number)
                    outcome = {"error": "this line failed; the log says why"}
            self._write(head | outcome)

    def _answer(self, line: bytes, head: dict[str, Any]) -> list[dict[str, Any]]:
        asked = _parse_line(line)
        head["id"] = asked.pop("id", None)
        prompt = asked.pop("prompt", None)
        if not isinstance(prompt, str):
            raise UserError("'prompt' is missing" if prompt is None else "'prompt' is not a text")
        for name in FOR_CALLERS:
            if name in asked:
                raise UserError(f"'{name}' is for callers in Python: leave it out")
        options = {**self._options, **asked}
        self._worker.engine.check_options(options)
        self._worker.engine.count_tokens(prompt)
        on_text = None
        if self._stream:

            def on_text(index: int, text: str) -> None:
                try:
                    self._write({**head, "index": index, "text": text})
                except BrokenPipeError:
                    # Nobody reads any more: the text ends at its next token, and so does the job.
                    self._worker.close()

        texts = run_and_wait(self._worker, prompt, options, on_text)
        return [text.as_dict() for text in texts]


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long as much as `_parse_line` needs to see that."""
    while line := file.readline(MOST_LINE_BYTES + 1):
        rest = line
        while len(rest) > MOST_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MOST_LINE_BYTES + 1)
        yield line.removesuffix(b"\n")


def _parse_line(line: bytes) -> dict[str, Any]:
    if len(line) > MOST_LINE_BYTES:
        raise UserError(f"the line is longer than {MOST_LINE_BYTES} bytes")
    try:
        asked = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
        # The answer holds the id again, inside an object: see that JSON can write it.
        json.dumps([[asked]])
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}, column {error.colno}") from None
    except ValueError:
        # Python reads no whole number of more than 4,300 digits.
        raise UserError("not JSON that can be read: a number has too many digits") from None
    except RecursionError:
        raise UserError("not JSON that can be read: nested too deeply") from None
    if not isinstance(asked, dict):
        raise UserError('not a JSON object, such as {"prompt": "a dog"}')
    return asked


def _refuse_constant(name: str) -> NoReturn:
    raise UserError(f"not JSON: it has no {name}")


class Terminal:
    """Asks for prompts, one per line, until the end of the input."""

    PROMPT = "prompt> "

    def __init__(
        self,
        worker: Worker,
        options: Mapping[str, Any],
        *,
        stream: bool,
        new_seed: Callable[[], int] | None = None,
    ) -> None:
        """`new_seed` gives a seed for each prompt; None: the options' own for all."""
        self._worker = worker
        self._options = dict(options)
        self._stream = stream
        self._new_seed = new_seed
        self._job: Job | None = None

    def cancel(self) -> bool:
        """Stop the text that is being written; False if there is none. For a signal handler."""
        job = self._job
        if job is None:
            return False
        job.cancelled.set()
        return True

    def run(self) -> None:
        while True:
            try:
                prompt = input(self.PROMPT)
            except EOFError:
                print(flush=True)
                return
            if not prompt.strip():
                continue
            options = dict(self._options)
            if self._new_seed is not None:
                options["seed"] = self._new_seed()
            printer = LivePrinter(prompt) if self._stream else None
            try:
                texts = run_and_wait(
                    self._worker, prompt, options, printer and printer.feed, self._remember
                )
            except UserError as error:
                print(f"error: {error}", flush=True)
                continue
            except ClosedError:
                return
            if printer is not None:
                printer.finish([text.text for text in texts])
            else:
                print("\n\n".join(text.text for text in texts), flush=True)

    def _remember(self, job: Job | None) -> None:
        self._job = job


class LivePrinter:
    """Prints the first text as it comes, and the others after it."""

    def __init__(self, prompt: str, write: Callable[[str], None] | None = None) -> None:
        """`write` takes text without adding to it; None: the standard output."""
        self._write = write or (lambda text: print(text, end="", flush=True))
        self._prompt = prompt
        self._shown = ""

    def feed(self, index: int, text: str) -> None:
        if index == 0:
            self._show(text)

    def finish(self, texts: list[str]) -> None:
        """Print what is missing. `texts` are whole: the prompt and what follows it."""
        self._show(texts[0].removeprefix(self._prompt + self._shown))
        self._write("\n")
        for text in texts[1:]:
            self._write(f"\n{text}\n")

    def _show(self, text: str) -> None:
        # The prompt comes with the first piece: a prompt that is refused leaves no trace.
        self._write(text if self._shown else self._prompt + text)
        self._shown += text
