"""Runs what a pipeline's command line asks for, and ends the same way on every rank.

Prompts come from the command line, from lines of JSON, or from a person at a terminal. The latter
two are read in a thread of their own on rank 0, so that the other ranks hear from rank 0 however
long the next line takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from oneflow_accel import distributed, launched, watchdog
from oneflow_accel.agree import everywhere, on_rank_0, plain_values, require_same
from oneflow_accel.errors import UserError

from libai_projects.command.check_files import OF_A_MACHINE
from libai_projects.inference import lockstep
from libai_projects.inference.jobs import ClosedError, Job, Worker
from libai_projects.inference.options import (
    FOR_CALLERS,
    Command,
    given_sampling_options,
    limits_of,
    parse_options,
)
from libai_projects.inference.pipeline import TextGenerationPipeline
from libai_projects.inference.requests import new_seed
from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import GeneratedText, Piece, is_prompt

logger = logging.getLogger("oneflow_accel")

Write = Callable[[Mapping[str, Any]], None]
# Longest line of JSON. GPT-2's 1,024 positions hold at most some 130 kB.
MOST_LINE_BYTES = 2**20


def run_and_wait(worker: Worker, job: Job) -> list[GeneratedText]:
    """Submit a job and wait for its texts; a UserError where there are none, a ClosedError of a
    worker that is closed."""
    worker.submit(job, wait=True)
    return job.texts.result()


class JsonLines:
    """One JSON object in for each line, one out, in the same order; `bad` counts the errors.

    In:  {"id": anything, "prompt": "a dog", "max_new_tokens": 20, ...}
    Out: {"id": ..., "line": 1, "results": [{"generated_text", "new_tokens", "finish_reason"}]}
    or:  {"id": ..., "line": 2, "error": "..."}
    before, with `stream`: {"id": ..., "line": 1, "index": 0, "text": " in"}
    The prompt may be token ids.
    """

    def __init__(self, worker: Worker, write: Write, *, stream: bool = False) -> None:
        self._worker = worker
        self._write = write
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
        if not is_prompt(prompt):
            what = "missing" if prompt is None else "not a text and no list of token ids"
            raise UserError(f"'prompt' is {what}")
        for name in FOR_CALLERS:
            if name in asked:
                raise UserError(f"'{name}' is for callers in Python: leave it out")
        on_text = None
        if self._stream:

            def on_text(piece: Piece) -> None:
                if not piece.text:
                    return
                try:
                    self._write({**head, "index": piece.index, "text": piece.text})
                except BrokenPipeError:
                    # Nobody reads any more: the text ends at its next token, and so does the job.
                    self._worker.close()

        job = Job([prompt], asked, on_text)
        return [text.as_dict() for text in run_and_wait(self._worker, job)]


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
        self, worker: Worker, *, stream: bool, new_seed: Callable[[], int] | None = None
    ) -> None:
        """`new_seed` gives a seed for each prompt; None: the pipeline's own for all."""
        self._worker = worker
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
            options = {"seed": self._new_seed()} if self._new_seed is not None else {}
            printer = LivePrinter(prompt) if self._stream else None
            self._job = Job([prompt], options, printer and printer.feed)
            try:
                texts = run_and_wait(self._worker, self._job)
            except ClosedError:
                return
            except UserError as error:
                print(f"error: {error}", flush=True)
                continue
            finally:
                self._job = None
            if printer is not None:
                printer.finish([text.text for text in texts])
            else:
                print("\n\n".join(text.text for text in texts), flush=True)


class LivePrinter:
    """Prints the first text as it comes, and the others after it."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._shown = ""

    def feed(self, piece: Piece) -> None:
        if piece.index == 0 and piece.text:
            self._show(piece.text)

    def finish(self, texts: list[str]) -> None:
        """Print what is missing. `texts` are whole: the prompt and what follows it."""
        self._show(texts[0].removeprefix(self._prompt + self._shown))
        print(flush=True)
        for text in texts[1:]:
            print(f"\n{text}", flush=True)

    def _show(self, text: str) -> None:
        # The prompt comes with the first piece: a prompt that is refused leaves no trace.
        print(text if self._shown else self._prompt + text, end="", flush=True)
        self._shown += text


# Name of the thread that reads prompts.
_READER = "prompts"


# Options of the command line that TextGenerationPipeline takes as they are.
_SAME_NAME = {
    *("config_file", "data_parallel", "tensor_parallel", "pipeline_parallel", "mode", "device"),
    *("pipeline_stage_id", "pipeline_num_layers", "vocab_file", "merges_file", "tokenizer"),
    *("overrides", "weights_dtype", "cache_dtype"),
}


def main(argv: Sequence[str], config_file: str, examples: Sequence[str]) -> int:
    """What a project's pipeline.py does: the exit code. `config_file` is its own, `examples` are
    prompts where the command line has none. A UserError is the same on every rank."""
    options = everywhere(lambda: parse_options(argv))
    options.config_file = options.config_file or config_file
    typed = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}
    require_same(plain_values(typed, (*OF_A_MACHINE, "model", "tokenizer", "host", "overrides")))
    _prepare_streams(needs_input=options.jsonl or options.interactive)
    # A rank that is killed would leave the others in a collective.
    with watchdog.guard():
        with _standard_output() if options.jsonl else contextlib.nullcontext() as write:
            pipeline = TextGenerationPipeline(
                model_path=options.model,
                **options.model_dump(include=_SAME_NAME),
                **given_sampling_options(options),
            )
            if write is not None:
                return _jsonl(options, pipeline, write)
        if options.serve:
            return _serve(options, pipeline)
        if options.interactive:
            return _interactive(options, pipeline)
        return _prompts(options, pipeline, options.prompt or list(examples))


def leave(code: int) -> NoReturn:
    """End the process with `code`, also while a thread waits for the next line of the input: it
    holds a lock without which Python's own end aborts."""
    if any(thread.name == _READER for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _prepare_streams(*, needs_input: bool) -> None:
    """No character ends the process: the output escapes what its encoding lacks, and input that is
    not in its encoding is left for the tokenizer to refuse."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="surrogateescape")
    elif needs_input:
        raise UserError("the standard input is closed: give prompts with --prompt, or a pipe")


def _prompts(options: Command, pipeline: TextPipeline, prompts: list[str]) -> int:
    if options.stream:
        seeds = pipeline.options.seed
        for number, prompt in enumerate(prompts):
            seed = seeds + number if isinstance(seeds, int) else seeds[number]
            printer = LivePrinter(prompt)
            if number and distributed.is_main():
                print(flush=True)
            texts = pipeline.generate([prompt], on_text=printer.feed, seed=seed)
            if distributed.is_main():
                printer.finish([text.text for text in texts])
        distributed.barrier()
        return 0
    results = pipeline(prompts, options.batch_size)
    if distributed.is_main():
        print("\n\n".join(result["generated_text"] for result in results), flush=True)
    return 0


def _interactive(options: Command, pipeline: TextPipeline) -> int:
    worker = Worker(pipeline)
    given = options.seed is not None
    terminal = Terminal(worker, stream=options.stream, new_seed=None if given else new_seed)

    # The launcher ends the job at Ctrl-C.
    is_launched = launched.launched()
    if distributed.is_main():
        keys = "Ctrl-D ends" if is_launched else "Ctrl-C stops a text, Ctrl-D ends"
        print(f"One prompt per line; {keys}.", flush=True)

    def stop(signum: int) -> None:
        if is_launched or signum == signal.SIGTERM or not terminal.cancel():
            worker.close()

    _run_with_source(worker, terminal.run, stop)
    return 0


def _jsonl(options: Command, pipeline: TextPipeline, write: Write) -> int:
    worker = Worker(pipeline)

    def write_line(line: Mapping[str, Any]) -> None:
        try:
            write(line)
        except BrokenPipeError:
            lines.bad += 1
            raise

    lines = JsonLines(worker, write_line, stream=options.stream)
    interrupted: list[int] = []

    def interrupt(signum: int) -> None:
        interrupted.append(signum)
        worker.close()

    _run_with_source(worker, lambda: lines.run(sys.stdin.buffer), interrupt)
    bad = on_rank_0(lambda: lines.bad)
    if interrupted:
        return 128 + interrupted[0]
    return 1 if bad else 0


def _run_with_source(
    worker: Worker, source: Callable[[], None], stop: Callable[[int], None]
) -> None:
    """Run the worker here and `source` in a thread of rank 0, until `source` ends; there `stop` is
    told of SIGINT and SIGTERM."""
    lockstep.end_on_signal()
    problems: list[str] = []
    if distributed.is_main():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: stop(signum))

        def read() -> None:
            try:
                source()
            except BrokenPipeError:
                # Nobody reads the results any more: there is nothing left to do.
                worker.close()
            except OSError as error:
                problems.append(f"cannot read the prompts: {error}")
            finally:
                worker.close(finish=True)

        threading.Thread(target=read, daemon=True, name=_READER).start()
    worker.run()
    if problem := on_rank_0(lambda: problems[:1]):
        raise UserError(problem[0])


def _serve(options: Command, pipeline: TextPipeline) -> int:
    # Imported here: only --serve needs the web libraries.
    from libai_projects.inference.server import Server

    limits = limits_of(options)
    worker = Worker(pipeline, queue_length=limits.queue, most_texts=limits.texts)
    server = everywhere(
        lambda: (
            Server(
                worker,
                limits,
                options.host,
                options.port,
                options.allowed_hosts,
                options.allowed_origins,
                os.environ.get("MAGICPROMPT_API_KEY") or None,
            )
            if distributed.is_main()
            else None
        )
    )
    lockstep.end_on_signal()
    if server is None:
        worker.run()
        return 0
    server.run()
    return 0


@contextlib.contextmanager
def _standard_output() -> Iterator[Write]:
    """The standard output for JSON lines only: whatever else prints goes to the standard error.
    Yields what writes one object on a line of its own, a BrokenPipeError where nobody reads."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    # Half a surrogate pair (in an id) has no UTF-8 form, only an escape, which is JSON's.
    file = os.fdopen(own, "w", encoding="utf-8", errors="backslashreplace")

    def write(value: Mapping[str, Any]) -> None:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")
        file.flush()

    try:
        yield write
    finally:
        with contextlib.suppress(BrokenPipeError):
            file.close()
