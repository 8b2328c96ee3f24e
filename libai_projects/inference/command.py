"""Runs what a pipeline's command line asks for, and ends the same way on every rank."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from oneflow_accel import distributed, launched, watchdog
from oneflow_accel.errors import UserError

from libai_projects.inference import lockstep
from libai_projects.inference.jobs import Worker
from libai_projects.inference.options import limits_of
from libai_projects.inference.requests import SEED_BOUND
from libai_projects.inference.sources import JsonLines, LivePrinter, Terminal
from libai_projects.inference.text_pipeline import TextPipeline

# Name of the thread that reads prompts.
_READER = "prompts"


def run(
    options: argparse.Namespace, build: Callable[[], TextPipeline], examples: Sequence[str]
) -> int:
    """Build the pipeline and do what `options` say, with `examples` where no prompts are given; the
    exit code. A UserError is the same on every rank."""
    _prepare_streams(needs_input=options.jsonl or options.interactive)
    # A rank that is killed would leave the others in a collective.
    with watchdog.guard():
        if options.jsonl:
            with _StandardOutput() as output:
                return _jsonl(options, build(), output)
        pipeline = build()
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


def _prompts(options: argparse.Namespace, pipeline: TextPipeline, prompts: list[str]) -> int:
    if options.stream:
        seeds = pipeline.options.seed
        for number, prompt in enumerate(prompts):
            seed = seeds + number if isinstance(seeds, int) else seeds[number]
            _stream_one(pipeline, prompt, seed, first=number == 0)
        distributed.barrier()
        return 0
    results = pipeline(prompts, options.batch_size)
    if distributed.is_main():
        print("\n\n".join(result["generated_text"] for result in results), flush=True)
    return 0


def _stream_one(pipeline: TextPipeline, prompt: str, seed: int, *, first: bool) -> None:
    if not distributed.is_main():
        pipeline.generate([prompt], seed=seed)
        return
    if not first:
        print(flush=True)
    printer = LivePrinter(prompt)
    texts = pipeline.generate([prompt], on_text=printer.feed, seed=seed)
    printer.finish([text.text for text in texts])


def _interactive(options: argparse.Namespace, pipeline: TextPipeline) -> int:
    worker = Worker(pipeline)
    new_seed = None if options.seed is not None else _new_seed
    terminal = Terminal(worker, {}, stream=options.stream, new_seed=new_seed)

    def close(*_: object) -> None:
        worker.close()

    def stop_text(*_: object) -> None:
        if not terminal.cancel():
            worker.close()

    if distributed.is_main():
        # The launcher ends the job at Ctrl-C.
        is_launched = launched.launched()
        keys = "Ctrl-D ends" if is_launched else "Ctrl-C stops a text, Ctrl-D ends"
        print(f"One prompt per line; {keys}.", flush=True)
        signal.signal(signal.SIGINT, close if is_launched else stop_text)
        signal.signal(signal.SIGTERM, close)
    _run_with_source(worker, terminal.run)
    return 0


def _new_seed() -> int:
    return random.SystemRandom().randrange(SEED_BOUND)


def _jsonl(options: argparse.Namespace, pipeline: TextPipeline, output: _StandardOutput) -> int:
    worker = Worker(pipeline)
    lines = JsonLines(worker, output.write_json, stream=options.stream)
    interrupted: list[int] = []

    def interrupt(signum: int, _frame: object) -> None:
        interrupted.append(signum)
        worker.close()

    if distributed.is_main():
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
    _run_with_source(worker, lambda: lines.run(sys.stdin.buffer))
    bad = lockstep.share(lines.bad)
    if interrupted:
        return 128 + interrupted[0]
    return 1 if bad or output.closed else 0


def _run_with_source(worker: Worker, source: Callable[[], None]) -> None:
    """Run the worker here and `source` in a thread of rank 0, until `source` ends."""
    lockstep.end_on_signal()
    problems: list[str] = []
    if distributed.is_main():

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
    if problem := lockstep.share(problems[:1]):
        raise UserError(problem[0])


def _serve(options: argparse.Namespace, pipeline: TextPipeline) -> int:
    # Imported here: only --serve needs the web libraries.
    from libai_projects.inference.serving import Server

    limits = limits_of(options)
    worker = Worker(pipeline, queue_length=limits.queue)
    server = lockstep.together(
        lambda: (
            Server(worker, limits, options.host, options.port, options.allowed_hosts)
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


class _StandardOutput:
    """The standard output for JSON lines only: whatever else prints goes to the standard error."""

    def __init__(self) -> None:
        self.closed = False

    def __enter__(self) -> _StandardOutput:
        sys.stdout.flush()
        self._own = os.dup(1)
        os.dup2(2, 1)
        self._file = os.fdopen(self._own, "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except BrokenPipeError:
            self.closed = True

    def write_json(self, value: Mapping[str, Any]) -> None:
        """Write one object on a line of its own; BrokenPipeError where nobody reads any more."""
        text = json.dumps(value, ensure_ascii=False)
        try:
            # Half a surrogate pair (in an id) has no UTF-8 form, only an escape.
            text.encode("utf-8")
        except UnicodeEncodeError:
            text = json.dumps(value)
        try:
            self._file.write(text + "\n")
            self._file.flush()
        except BrokenPipeError:
            self.closed = True
            raise
