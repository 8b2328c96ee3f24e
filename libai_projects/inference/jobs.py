"""One queue of requests and one worker that runs them, on one process or on several."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError

from libai_projects.inference import lockstep
from libai_projects.inference.text_pipeline import GeneratedText, TextPipeline

logger = logging.getLogger("oneflow_accel")


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


@dataclass
class Job:
    """One request. Its `texts` come, or a NoTextsError. `on_text`, see `TextPipeline.generate`, and
    callbacks of `texts` run in the worker's thread and must not block. `deadline` is a time of
    `time.monotonic()`."""

    prompts: Sequence[str]
    options: Mapping[str, Any]
    on_text: Callable[[int, str], None] | None = None
    deadline: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    texts: Future[list[GeneratedText]] = field(default_factory=Future)

    def reason_to_stop(self) -> str | None:
        if self.cancelled.is_set():
            return "cancelled"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "time"
        return None


class Worker:
    """Runs jobs one after another in the thread that calls `run`: the main thread of each rank,
    as oneflow runs global tensors only in the thread they began with. Other threads of rank 0
    submit."""

    def __init__(self, engine: TextPipeline, *, queue_length: int = 16) -> None:
        self.engine = engine
        self._jobs: queue.Queue[Job] = queue.Queue(maxsize=queue_length)
        self._closing = threading.Event()
        self._finish = False
        self._lock = threading.Lock()
        self._running: Job | None = None

    @property
    def waiting(self) -> int:
        """How many jobs wait, the one that runs not counted."""
        return self._jobs.qsize()

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def submit(self, job: Job, *, wait: bool = False) -> None:
        """Put a job at the end of the queue; with `wait`, wait for a place. Raises QueueFullError,
        or ClosedError after `close`."""
        while True:
            # Under the lock, so that no job slips in after the worker has emptied the queue.
            with self._lock:
                if self.closing:
                    raise ClosedError
                try:
                    self._jobs.put_nowait(job)
                    return
                except queue.Full:
                    if not wait:
                        raise QueueFullError from None
            time.sleep(0.05)

    def close(self, *, finish: bool = False) -> None:
        """End `run` soon: the running job stops at its next token, waiting ones are refused or,
        with `finish`, run first. Safe to call from a signal handler and more than once."""
        if not finish:
            running = self._running
            if running is not None:
                running.cancelled.set()
        self._finish = finish
        self._closing.set()

    def run(self) -> None:
        """Work until `close`; on ranks other than 0, until rank 0 says so."""
        if not distributed.is_main():
            self._follow()
            return
        job: Job | None = None
        try:
            job = self._lead_all()
        finally:
            # Nobody waits for an answer that cannot come, whatever ended the work.
            self.close()
            self._refuse(job)
        self._tell({"do": "end"})

    def _lead_all(self) -> Job | None:
        """Work until `close`; returns a job that was taken from the queue and not begun."""
        spoke = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=0.1)
            except queue.Empty:
                job = None
            if self.closing and not (job is not None and self._finish):
                return job
            if job is not None:
                self._lead(job)
                spoke = time.monotonic()
            elif time.monotonic() - spoke > lockstep.HEARTBEAT_SECONDS:
                self._tell({"do": "wait"})
                spoke = time.monotonic()

    def _refuse(self, job: Job | None) -> None:
        with self._lock:
            while True:
                if job is not None:
                    job.texts.set_exception(NoTextsError("closed", "the server is shutting down"))
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    return

    def _lead(self, job: Job) -> None:
        reason = job.reason_to_stop()
        if reason is not None:
            late = NoTextsError("late", "no time was left after waiting: too many asked at once")
            cancelled = NoTextsError("cancelled", "cancelled")
            job.texts.set_exception(late if reason == "time" else cancelled)
            return
        self._running = job
        if self.closing and not self._finish:
            job.cancelled.set()
        told, asked = False, {"prompts": list(job.prompts), "options": dict(job.options)}
        try:
            self._tell({"do": "generate", **asked})
            told = True
            texts = self.engine.generate(
                job.prompts, on_text=job.on_text, should_stop=job.reason_to_stop, **job.options
            )
        except UserError as error:
            self._running = None
            job.texts.set_exception(NoTextsError("refused", str(error)))
        except Exception as error:
            self._running = None
            said = "the generation failed; the log says why"
            job.texts.set_exception(NoTextsError("failed", said))
            # Ranks that were not told of a job are not where this one is.
            if not told or isinstance(error, lockstep.OutOfStepError):
                raise
            logger.exception("a request failed")
        else:
            self._running = None
            job.texts.set_result(texts)

    def _follow(self) -> None:
        while True:
            message = on_rank_0(lambda: None)
            if message["do"] == "end":
                return
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
