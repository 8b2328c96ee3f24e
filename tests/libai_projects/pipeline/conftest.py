"""A server of a fake model, in threads of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pipeline_fakes import CycleModel, fake_pipeline

from libai_projects.inference.jobs import Worker
from libai_projects.inference.requests import Limits
from libai_projects.inference.server import Server


@dataclass
class Running:
    url: str
    worker: Worker
    model: CycleModel


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`serve(delay=, key=, allowed_origins=, **limits)` starts a server; all are stopped at the end
    of the test."""

    @contextmanager
    def running(delay: float, limits: dict[str, Any]) -> Iterator[Running]:
        pipeline = fake_pipeline(tmp_path, delay=delay)
        more = {name: limits.pop(name) for name in ("key", "allowed_origins") if name in limits}
        bounds = Limits(**limits)
        worker = Worker(pipeline, queue_length=bounds.queue, most_texts=bounds.texts)
        server = Server(worker, bounds, "127.0.0.1", 0, **more)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield Running(server.address, worker, pipeline.model)
        finally:
            worker.close()
            thread.join(20)
        assert not thread.is_alive()

    with ExitStack() as stack:
        yield lambda delay=0.0, **limits: stack.enter_context(running(delay, limits))
