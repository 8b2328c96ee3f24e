"""One queue of requests and one worker that writes their texts, many at once, on one or more
processes: each joins and leaves between two steps of the model.

Process 0 says which tokens of which sequences are read next, and chooses the next ones; the others
are told the `Step` and run it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from oneflow_accel import distributed
from oneflow_accel.agree import on_rank_0
from oneflow_accel.errors import UserError
from oneflow_accel.kernels.generation import PAGE

import numpy as np

from libai_projects.generation import GenerationOptions
from libai_projects.generation.generate import Decoding, prepared
from libai_projects.generation.interface import Cache, StepModel
from libai_projects.generation.sequences import FinishReason, Stopping, TokenScore
from libai_projects.inference import lockstep
from libai_projects.inference.text_pipeline import TextPipeline
from libai_projects.inference.texts import GeneratedText, OnPiece, Prompt, Texts
from libai_projects.models.pages import Step

logger = logging.getLogger("oneflow_accel")

# Tokens of prompts that one step reads at most: the others wait no longer for their next token.
CHUNK = 256
_FAILED = "the generation failed; the log says why"


class NoTextsError(UserError):
    """Why there are no texts: "full" (as many wait as may wait), "refused" (a request that cannot
    be used), "late" (no time was left), "cancelled", "closed" (the worker ends) or "failed" (the
    model), and one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ClosedError(NoTextsError):
    """The worker takes no more requests."""

    def __init__(self) -> None:
        super().__init__("closed", "the server is shutting down")


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
    # Once the worker has looked at it; none if it runs alone.
    group: Group | None = None

    def reason_to_stop(self) -> FinishReason | None:
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
        if not isinstance(error, UserError):
            logger.error("a request failed", exc_info=error)
            error = NoTextsError("failed", _FAILED)
        elif not isinstance(error, NoTextsError):
            error = NoTextsError("refused", str(error))
        if not self.texts.done():
            self.texts.set_exception(error)


def _is_batched(options: GenerationOptions) -> bool:
    """Whether texts of these options are written beside others: token by token, with keys and
    values kept, and with no functions of the caller's, which may look at all rows of a call."""
    functions = (options.logits_processor, options.stopping_criteria)
    alone = options.num_beams > 1 or options.output_scores or any(functions)
    return options.use_cache and not alone and options.prefix_allowed_tokens_fn is None


class Group:
    """The texts of a job that is written beside others. Raises UserError where the prompts and
    their options do not fit the model."""

    def __init__(self, job: Job, engine: TextPipeline, options: GenerationOptions) -> None:
        self.job, self.options = job, options.replace(stop_strings=())
        self.rows = rows = prepared(engine.model, [*map(engine.encode, job.prompts)], self.options)
        self.prompts = rows.tokens()
        self._texts = Texts(
            engine.tokenizer, job.prompts, options, job.on_text, keeps_stop=job.keeps_stop
        )
        returns = options.num_return_sequences
        self.texts = len(self.prompts) * returns
        # Of each prompt's sequences, whose last token is never read.
        self.pages = -(-(rows.limits - 1) // PAGE)
        shared = rows.lengths // PAGE
        self.most_pages = int((shared + returns * (self.pages - shared)).sum())
        self.decoding: Decoding
        # Numbers in the cache of the prompts, what is left to read of each, and what follows them;
        # then the numbers of the sequences that go on and their tokens to read next.
        self.numbers: list[int] = []
        self.unread: list[list[int]] = []
        self.first: dict[int, np.ndarray] = {}
        self.tokens = np.empty(0, dtype=np.int64)

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompts has not been read."""
        return any(self.unread)

    def on_token(self, index: int, token: int, score: TokenScore | None) -> bool:
        self.job.last_token = time.monotonic()
        self.job.first_token = self.job.first_token or self.job.last_token
        return self._texts.feed(index, token, score)

    def finish(self) -> None:
        try:
            self.job.finish(self._texts.finish(self.decoding.sequences))
        except Exception as error:
            self.job.fail(error)


class Batcher:
    """The prompts that are being read and continued, `most_texts` texts at most, or one job's.
    Every process makes one; process 0 alone knows groups."""

    def __init__(self, model: StepModel, most_texts: int) -> None:
        self._model, self._most_texts = model, most_texts
        self.groups: list[Group] = []
        longest = -(-model.max_positions // PAGE)
        free, pages = model.free_memory(), most_texts * longest
        if free is not None:
            # The other half is for what the steps themselves need, and for requests that run alone.
            pages = min(pages, free // 2 // max(1, model.page_bytes))
        self.capacity = max(longest, pages)
        # Of the step that was planned last: of whom its rows are.
        self._parts: list[tuple[Group, list[int]]] = []
        self.cache: Cache = model.new_cache(self.capacity)

    @property
    def texts(self) -> int:
        """How many are read or written now."""
        return sum(each.texts if each.is_reading else len(each.numbers) for each in self.groups)

    def add(self, group: Group) -> bool:
        """Begin with a group, unless it has to wait until there is room for all that it may write;
        a UserError if there never is."""
        if group.most_pages > self.capacity:
            raise UserError(
                f"{group.texts} texts need up to {group.most_pages} pages of {PAGE} tokens, and "
                f"the cache has {self.capacity}: ask for fewer or shorter ones"
            )
        if self.groups and self.texts + group.texts > self._most_texts:
            return False
        pages, model = self.cache.pages, self._model
        found = [pages.add(ids, share=model.shares_prefixes) for ids in group.prompts]
        group.numbers = [number for number, _ in found]
        group.unread = [ids[n:] for ids, (_, n) in zip(group.prompts, found, strict=True)]
        if sum(map(self._pages_to_come, [*self.groups, group])) > pages.free:
            for number in group.numbers:
                pages.release(number)
            return False
        # Its time runs from here.
        stopping = Stopping(group.options, model.max_positions, time.monotonic)
        group.decoding = Decoding(
            group.rows, group.options, model.vocab_size, stopping, group.on_token
        )
        self.groups.append(group)
        return True

    def _pages_to_come(self, group: Group) -> int:
        """The most pages that a group will take beyond those that it has."""
        lengths = np.array([self.cache.pages.length(number) for number in group.numbers])
        if len(group.tokens) == 0:
            return group.most_pages - int((-(-lengths // PAGE)).sum())
        # Of copies whose last page is one, each may need its own.
        decoding = group.decoding
        return int((group.pages[decoding.copies[decoding.alive]] - lengths // PAGE).sum())

    def remove(self, group: Group) -> None:
        """Forget a group: its pages are free."""
        self.groups.remove(group)
        for number in group.numbers:
            self.cache.pages.release(number)

    def end(self, group: Group, reason: FinishReason) -> None:
        """Let a group end with what there is."""
        self.remove(group)
        group.decoding.end(reason)
        group.finish()

    def fail(self, error: Exception) -> None:
        """No group has texts, and nobody knows what the cache holds."""
        groups, self.groups = self.groups, []
        self.cache = self._model.new_cache(self.capacity)
        for group in groups:
            group.job.fail(error)

    def plan(self) -> Step:
        """The next step: a token of each text, and of the prompts a chunk."""
        rows: list[tuple[int, list[int]]] = []
        readers = sum(bool(unread) for group in self.groups for unread in group.unread)
        left, self._parts = CHUNK, []
        for group in self.groups:
            if not group.is_reading:
                rows += zip(group.numbers, group.tokens[:, None].tolist(), strict=True)
                self._parts.append((group, [*range(len(group.tokens))]))
                continue
            places: list[int] = []
            for place, unread in enumerate(group.unread):
                if not unread:
                    continue
                readers -= 1
                # Who came first may take the chunk, but leaves half of it to those behind.
                count = min(-(-left // 2) if readers else left, len(unread))
                if not self._model.shares_prefixes:
                    # Keys depend on how much is read at once.
                    count = len(unread)
                if count:
                    rows.append((group.numbers[place], unread[:count]))
                    places.append(place)
                    del unread[:count]
                    left = max(0, left - count)
            self._parts.append((group, places))
        return self._model.plan(self.cache, rows)

    def run(self, step: Step) -> np.ndarray:
        """What the model answers to a step; every process."""
        with lockstep.collective():
            return self._model.run(step, self.cache)

    def choose(self, logits: np.ndarray) -> None:
        """Go on by what the model answered to the step that was planned last."""
        end = 0
        for group, places in self._parts:
            begin, end = end, end + len(places)
            try:
                self._go_on(group, places, logits[begin:end])
            except Exception as error:
                self.remove(group)
                group.job.fail(error)

    def _go_on(self, group: Group, places: list[int], logits: np.ndarray) -> None:
        decoding, pages = group.decoding, self.cache.pages
        if len(group.tokens) == 0:
            group.first.update(zip(places, logits, strict=True))
            if group.is_reading:
                return
            if self._model.shares_prefixes:
                for number, prompt in zip(group.numbers, group.prompts, strict=True):
                    pages.remember(number, prompt)
            group.numbers = pages.select(group.numbers, decoding.copies)
            logits = np.stack([group.first[place] for place in decoding.copies])
            group.first.clear()
        going_on, group.tokens = decoding.choose(logits)
        group.numbers = pages.select(group.numbers, going_on)
        if not group.numbers:
            self.remove(group)
            group.finish()


def _unfinished(reason: FinishReason) -> NoTextsError:
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
        self.batcher = Batcher(engine.model, most_texts)
        self._queue_length = queue_length
        # Those that wait, and one that runs alone.
        self._jobs: deque[Job] = deque()
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
        return self._alone is not None or bool(self.batcher.groups)

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def submit(self, job: Job, *, wait: bool = False) -> None:
        """Put a job at the end of the queue; with `wait`, wait for a place. Raises a NoTextsError
        where there is none, or ClosedError after `close`."""
        with self._changed:
            while not self.closing and len(self._jobs) >= self._queue_length:
                if not wait:
                    many = f"{self._queue_length} requests wait already: try again in a few seconds"
                    raise NoTextsError("full", many)
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
                job.fail(ClosedError())
            self._jobs.clear()
        for job in filter(None, [*(group.job for group in self.batcher.groups), self._alone]):
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
            if self.batcher.groups:
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

    def _reason_to_stop(self, job: Job) -> FinishReason | None:
        ends = self.closing and not self._finish and time.monotonic() >= self._end_at
        return job.reason_to_stop() or ("cancelled" if ends else None)

    def _sweep(self) -> None:
        """Whoever went away, is late or has to end frees its place."""
        refused = self.closing and not self._finish
        with self._changed:
            for job in list(self._jobs):
                if (reason := job.reason_to_stop()) is not None:
                    job.fail(_unfinished(reason))
                elif refused:
                    job.fail(ClosedError())
            self._jobs = deque(job for job in self._jobs if not job.texts.done())
            self._changed.notify_all()
        for group in list(self.batcher.groups):
            if (reason := self._reason_to_stop(group.job)) is not None:
                if group.job.first_token is None:
                    group.job.fail(_unfinished(reason))
                self.batcher.end(group, reason)

    def _begin(self) -> None:
        """Begin with the jobs that have waited longest, as far as there is room."""
        while self._jobs:
            job = self._jobs[0]
            try:
                if job.group is None:
                    options = self.engine.check_options(job.options)
                    job.group = Group(job, self.engine, options) if _is_batched(options) else None
                if job.group is not None and not self.batcher.add(job.group):
                    return
            except Exception as error:
                job.fail(error)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
            if job.group is None and not job.texts.done():
                self._lead(job)

    def _step(self) -> None:
        """The next token of each text."""
        step = self.batcher.plan()
        self._tell({"do": "step", "step": step})
        try:
            logits = self.batcher.run(step)
        except lockstep.OutOfStepError:
            raise
        except Exception:
            logger.exception("a step of the model failed")
            self.batcher.fail(NoTextsError("failed", _FAILED))
        else:
            self.batcher.choose(logits)

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
                self.batcher.run(message["step"])
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
