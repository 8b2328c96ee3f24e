"""One queue of requests and one worker that runs them, many at once, on one or more processes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError

from libai_projects.generation import GenerationOptions
from libai_projects.generation.sequences import GeneratedSequence, TokenScore
from libai_projects.inference import lockstep
from libai_projects.inference.batching import Batcher, Group, is_batched
from libai_projects.inference.text_pipeline import Prompt, TextPipeline
from libai_projects.inference.texts import GeneratedText, OnPiece, TextOf

logger = logging.getLogger("oneflow_accel")

_FAILED = "the generation failed; the log says why"
_CLOSED = "the server is shutting down"


class QueueFullError(Exception):
    """As many requests wait as may wait."""


class ClosedError(Exception):
    """The worker takes no more requests: it is shutting down."""


class NoTextsError(Exception):
    """Why a job has no texts: "refused" (a request that cannot be used), "late" (no time was left),
    "cancelled", "closed" (the worker ends) or "failed" (the model), and one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(eq=False)
class Job:
    """One request. Its `texts` come, or a NoTextsError. `on_text`, see `TextPipeline.generate`, and
    callbacks of `texts` run in the worker's thread and must not block. Times are those of
    `time.monotonic()`: the `deadline`, and when the first and the last token came. A text ends with
    the stop string that ended it, or before it, unless `keeps_stop`."""

    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    on_text: OnPiece | None = None
    deadline: float | None = None
    keeps_stop: bool = True
    cancelled: threading.Event = field(default_factory=threading.Event)
    texts: Future[list[GeneratedText]] = field(default_factory=Future)
    first_token: float | None = None
    last_token: float | None = None
    # Of each prompt, once the worker has looked at it; none if the job runs alone.
    groups: list[Group] = field(default_factory=list)

    def reason_to_stop(self) -> str | None:
        if self.cancelled.is_set():
            return "cancelled"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "time"
        return None

    def finish(self, texts: list[GeneratedText]) -> None:
        if not self.texts.done():
            self.texts.set_result(texts)

    def fail(self, error: Exception) -> None:
        """There are no texts; of what is no one's fault but ours the log says more."""
        if isinstance(error, UserError):
            error = NoTextsError("refused", str(error))
        elif not isinstance(error, NoTextsError):
            logger.error("a request failed", exc_info=error)
            error = NoTextsError("failed", _FAILED)
        if not self.texts.done():
            self.texts.set_exception(error)


def _groups(job: Job, engine: TextPipeline, options: GenerationOptions) -> list[Group]:
    """What becomes of a job beside others, one for each prompt; UserError where nothing can."""
    seeds, found = options.seed, dict[int, list[GeneratedText]]()
    if isinstance(seeds, int):
        seeds = tuple(range(seeds, seeds + len(job.prompts)))
    if len(seeds) != len(job.prompts):
        raise UserError(f"{len(seeds)} seeds were given for {len(job.prompts)} prompts")

    def group(number: int) -> Group:
        @cache
        def text(index: int) -> TextOf:
            return TextOf(
                engine.tokenizer,
                number * options.num_return_sequences + index,
                engine.text_of(job.prompts[number]),
                stops=options.stop_strings,
                keeps_stop=job.keeps_stop,
                on_piece=job.on_text,
            )

        def on_token(index: int, token: int, score: TokenScore | None) -> bool:
            job.last_token = time.monotonic()
            job.first_token = job.first_token or job.last_token
            return text(index).feed(token, score)

        def on_end(sequences: list[GeneratedSequence] | Exception) -> None:
            try:
                if isinstance(sequences, Exception):
                    raise sequences
                found[number] = [
                    engine.result(job.prompts, number, sequence, text(index), options)
                    for index, sequence in enumerate(sequences)
                ]
                if len(found) == len(job.prompts):
                    job.finish([each for _, texts in sorted(found.items()) for each in texts])
            except Exception as error:
                job.fail(error)

        own = options.replace(seed=seeds[number], stop_strings=())
        return Group(engine.model, engine.encode(job.prompts[number]), own, on_token, on_end)

    return [group(number) for number in range(len(job.prompts))]


def _unfinished(reason: str) -> NoTextsError:
    if reason == "time":
        return NoTextsError("late", "no time was left after waiting: too many asked at once")
    return NoTextsError("cancelled", "cancelled")


class Worker:
    """Runs jobs in the thread that calls `run`: the main thread of each rank, as oneflow runs
    global tensors only in the thread they began with. Other threads of rank 0 submit.

    Jobs begin in the order of their arrival, and `most_texts` texts are written at once; what
    cannot be written beside others, such as beams, runs alone between two steps.
    """

    def __init__(
        self, engine: TextPipeline, *, queue_length: int = 16, most_texts: int = 64
    ) -> None:
        self.engine = engine
        self._batcher = Batcher(engine.model, most_texts)
        self._queue_length = queue_length
        # Those that wait, those that run beside each other, and one that runs alone.
        self._jobs: deque[Job] = deque()
        self._running: list[Job] = []
        self._alone: Job | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._finish = False
        self._end_at = 0.0

    @property
    def waiting(self) -> int:
        """How many jobs wait, those that run not counted."""
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        return self._alone is not None or bool(self._running)

    @property
    def texts(self) -> int:
        """How many texts are being written beside each other."""
        return self._batcher.texts

    @property
    def tokens(self) -> tuple[int, int]:
        """How many tokens of prompts have been read, and how many have been chosen."""
        return self._batcher.prompt_tokens, self._batcher.tokens

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def submit(self, job: Job, *, wait: bool = False) -> None:
        """Put a job at the end of the queue; with `wait`, wait for a place. Raises QueueFullError,
        or ClosedError after `close`."""
        with self._changed:
            while not self.closing and len(self._jobs) >= self._queue_length:
                if not wait:
                    raise QueueFullError
                # Not for long: `close` tells nobody, as a signal handler must not wait for a lock.
                self._changed.wait(0.1)
            if self.closing:
                raise ClosedError
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, *, finish: bool = False, grace: float = 0.0) -> None:
        """End `run` soon: running jobs may go on for `grace` s and stop at their next token then,
        waiting ones are refused or, with `finish`, run first. Safe to call from a signal handler
        and more than once."""
        self._finish, self._end_at = finish, time.monotonic() + grace
        self._closing.set()

    def abandon(self, error: NoTextsError) -> None:
        """Tell all who wait that nothing comes any more; from any thread."""
        self.close()
        with self._changed:
            for job in self._jobs:
                job.fail(NoTextsError("closed", _CLOSED))
            self._jobs.clear()
        for job in filter(None, [*self._running, self._alone]):
            job.fail(error)

    def run(self) -> None:
        """Work until `close`; on ranks other than 0, until rank 0 says so."""
        if not distributed.is_main():
            self._follow()
            return
        try:
            self._lead_all()
        finally:
            # Nobody waits for an answer that cannot come, whatever ended the work.
            self.abandon(NoTextsError("failed", _FAILED))
        self._tell({"do": "end"})

    def _lead_all(self) -> None:
        spoke = time.monotonic()
        while True:
            self._sweep()
            self._begin()
            if self._running:
                self._step()
                spoke = time.monotonic()
                continue
            with self._changed:
                if self.closing and not self._jobs:
                    return
                if not self._jobs:
                    self._changed.wait(0.1)
            if time.monotonic() - spoke > lockstep.HEARTBEAT_SECONDS:
                self._tell({"do": "wait"})
                spoke = time.monotonic()

    def _reason_to_stop(self, job: Job) -> str | None:
        ends = self.closing and not self._finish and time.monotonic() >= self._end_at
        return job.reason_to_stop() or ("cancelled" if ends else None)

    def _sweep(self) -> None:
        """Whoever went away, is late or has to end frees its place."""
        refused = self.closing and not self._finish
        for job in list(self._jobs):
            if (reason := job.reason_to_stop()) is not None:
                job.fail(_unfinished(reason))
            elif refused:
                job.fail(NoTextsError("closed", _CLOSED))
        for job in self._running:
            if (reason := self._reason_to_stop(job)) is None:
                continue
            if job.first_token is None:
                job.fail(_unfinished(reason))
            for group in job.groups:
                self._batcher.end(group, reason)
        self._drop_done()

    def _drop_done(self) -> None:
        for job in self._running:
            for group in job.groups if job.texts.done() else ():
                self._batcher.remove(group)
        self._running = [job for job in self._running if not job.texts.done()]
        with self._changed:
            self._jobs = deque(job for job in self._jobs if not job.texts.done())
            self._changed.notify_all()

    def _begin(self) -> None:
        """Begin with the jobs that have waited longest, as far as there is room."""
        while self._jobs:
            job = self._jobs[0]
            try:
                options = self.engine.check_options(job.options)
                if not job.groups and is_batched(options):
                    job.groups = _groups(job, self.engine, options)
                    self._batcher.check(job.groups)
                if job.groups and not self._batcher.add(job.groups):
                    return
            except Exception as error:
                job.fail(error)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
            if job.groups and not job.texts.done():
                self._running.append(job)
            elif not job.texts.done():
                self._lead(job)

    def _step(self) -> None:
        """The next token of each text."""
        step = self._batcher.plan()
        self._tell({"do": "step", "step": step})
        try:
            logits = self._batcher.run(step)
        except Exception as error:
            if distributed.world_size() > 1:
                raise lockstep.OutOfStepError(f"{type(error).__name__}: {error}") from error
            logger.exception("a step of the model failed")
            self._batcher.fail(NoTextsError("failed", _FAILED))
        else:
            self._batcher.choose(logits)
        self._drop_done()

    def _lead(self, job: Job) -> None:
        """Run a job alone."""
        self._alone = job
        told, asked = False, {"prompts": list(job.prompts), "options": dict(job.options)}
        try:
            self._tell({"do": "generate", **asked})
            told = True
            texts = self.engine.generate(
                job.prompts,
                on_text=job.on_text,
                should_stop=lambda: self._reason_to_stop(job),
                **job.options,
            )
            self._batcher.tokens += sum(text.new_tokens for text in texts)
            job.first_token = job.last_token = time.monotonic()
        except Exception as error:
            self._alone = None
            job.fail(error)
            # Ranks that were not told of a job are not where this one is.
            if not told or isinstance(error, lockstep.OutOfStepError):
                raise
        else:
            self._alone = None
            job.finish(texts)

    def _follow(self) -> None:
        while True:
            message = on_rank_0(lambda: None)
            if message["do"] == "end":
                return
            if message["do"] == "step":
                try:
                    self._batcher.run(message["step"])
                except Exception as error:
                    raise lockstep.OutOfStepError(f"{type(error).__name__}: {error}") from error
            if message["do"] == "generate":
                try:
                    self.engine.generate(
                        message["prompts"], should_stop=lambda: None, **message["options"]
                    )
                except (UserError, lockstep.OtherRankError):
                    logger.debug("rank 0 has the same, and tells whoever asked")
                except lockstep.OutOfStepError:
                    raise
                except Exception:
                    logger.exception("a request failed")

    @staticmethod
    def _tell(message: dict[str, Any]) -> None:
        if distributed.world_size() > 1:
            on_rank_0(lambda: message)
