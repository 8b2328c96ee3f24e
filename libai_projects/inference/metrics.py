"""What GET /metrics says, in Prometheus' text form: how much is asked for, how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from libai_projects.inference.jobs import Job, NoTextsError, Worker
from libai_projects.inference.texts import GeneratedText

# Bounds in seconds, from a small model's on a card to a large one's on few cores.
_FIRST = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_EACH = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Of one server; used in its loop's thread, and by callbacks of jobs."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen = time.monotonic(), 0
        self._registry = registry = CollectorRegistry()
        where: dict[str, Any] = {"registry": registry}
        self._requests = Counter("requests", "for texts, by how they ended", ["outcome"], **where)
        self._first = Histogram(
            "time_to_first_token_seconds", "from a request's arrival", buckets=_FIRST, **where
        )
        self._each = Histogram(
            "time_per_token_seconds", "after the first, a request's mean", buckets=_EACH, **where
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What the worker counts; for the registry."""
        worker, (read, written), now = self._worker, self._worker.tokens, time.monotonic()
        (then, before), self._seen = self._seen, (now, written)
        rate = (written - before) / max(now - then, 1e-9)
        yield GaugeMetricFamily("requests_waiting", "requests in the queue", value=worker.waiting)
        yield GaugeMetricFamily("texts_running", "texts that are being written", value=worker.texts)
        yield CounterMetricFamily("prompt_tokens", "tokens of prompts that were read", value=read)
        yield CounterMetricFamily("new_tokens", "tokens that were written", value=written)
        since = "tokens written since this was asked for last"
        yield GaugeMetricFamily("new_tokens_per_second", since, value=rate)

    def watch(self, job: Job, arrived: float) -> None:
        """Count a job and its times at its end."""

        def end(texts: Future[list[GeneratedText]]) -> None:
            if (error := texts.exception()) is not None:
                self._requests.labels(error.kind if isinstance(error, NoTextsError) else "").inc()
                return
            reasons = {text.finish_reason for text in texts.result()}
            outcome = next((each for each in ("cancelled", "time") if each in reasons), "done")
            self._requests.labels(outcome).inc()
            if job.first_token is not None and job.last_token is not None:
                self._first.observe(job.first_token - arrived)
                longest = max(text.new_tokens for text in texts.result())
                if longest > 1:
                    self._each.observe((job.last_token - job.first_token) / (longest - 1))

        job.texts.add_done_callback(end)

    def refuse(self, status: int) -> None:
        """Count a request that never became a job."""
        self._requests.labels({429: "queue full", 503: "closed"}.get(status, "refused")).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
