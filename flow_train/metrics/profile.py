"""Where the time of a training step goes: by operator, by module, and as a trace to look at.

    with Profiler(model, backend) as profiler:
        for batch in batches:
            train(batch)
    print(profiler.operator_table(steps), profiler.module_table(steps))
    profiler.write_trace(Path("trace.json"))

Operators are timed by OneFlow itself, as they run. Which module they belong to is known because the
device is waited for at each border between modules: in the forward pass where a module is entered
and left, in the backward pass where the gradient of a module's output is there. So a profiled step
is slower than others; the times of the operators are not.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oneflow_accel import distributed
from oneflow_accel.backends.base import Backend
from oneflow_accel.errors import UserError

import oneflow as flow
from oneflow import nn

from flow_train.cli import text_table
from flow_train.files import replace_file
from flow_train.hooks import Hook, Run

logger = logging.getLogger("oneflow_accel")

TRACE_NAME = "profile.json"
# Steps before the profile: the first ones allocate and compile.
WARM_UP_STEPS = 3
FORWARD, BACKWARD = "forward", "backward"
OUTSIDE, OPTIMIZER = "(between modules)", "(optimizer)"
# Symbols of liboneflow 0.9.0: the profiler that `EnableProfiler` makes, and what hands its events
# over. `oneflow.profiler` itself waits for a CUDA device first, and ends a process without one.
_MANAGER = "_ZZN7oneflow9SingletonINS_8profiler14ProfileManagerEvE7GetPPtrEvE3ptr"
_EXPORT = "_ZN7oneflow8profiler14ProfileManager12ExportEventsEv"


class Span(NamedTuple):
    """Something that took from `start` to `stop`, in ns since 1970."""

    name: str
    start: int
    stop: int


class Border(NamedTuple):
    """What operators belong to from a moment on: a module, or OUTSIDE or OPTIMIZER."""

    time: int
    owner: str
    phase: str


class Profiler:
    """Times operators and, with `modules`, notes what module they belong to; see the module's text.
    The model is in training, local to this process; `operators` is there after the `with` block.
    UserError if this build of oneflow has another profiler than 0.9.0's."""

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        optimizer: flow.optim.Optimizer | None = None,
        *,
        modules: bool = True,
    ) -> None:
        self._library = _library()
        self._backend = backend
        self._model = model
        self._optimizer = optimizer
        self._tells_modules = modules
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._hook_key = object()
        # The modules that run, and their places in `_forwards`.
        self._open: list[tuple[str, int]] = []
        # What produced the tensors of a step, by id; the tensors are kept, so that no id comes
        # twice.
        self._produced: dict[int, flow.Tensor] = {}
        self._borders: list[Border] = []
        self._forwards: list[Span] = []
        self.operators: list[Span] = []
        self.seconds = 0.0

    def __enter__(self) -> Profiler:
        self._backend.synchronize()
        with _quiet():
            flow._oneflow_internal.profiler.EnableProfiler(True, False, False, False)
        self._began = time.time_ns()
        self._watch()
        return self

    def __exit__(self, *exception: object) -> None:
        self._backend.synchronize()
        self.seconds = (time.time_ns() - self._began) / 1e9
        self._unwatch()
        with _quiet():
            self.operators = _events(self._library)

    def _watch(self) -> None:
        self._borders = [Border(self._began, OUTSIDE, FORWARD)]
        if not self._tells_modules:
            return
        for name, module in self._model.named_modules():
            module._forward_pre_hooks[self._hook_key] = functools.partial(self._enter, name)
            module._forward_hooks[self._hook_key] = functools.partial(self._leave, name)
        if self._optimizer is not None:
            update = self._optimizer.step

            def step(*args: Any, **kwargs: Any) -> Any:
                self._border(OPTIMIZER, FORWARD)
                result = update(*args, **kwargs)
                self._border(OUTSIDE, FORWARD)
                self._produced.clear()
                return result

            self._optimizer.step = step

    def _unwatch(self) -> None:
        if not self._tells_modules:
            return
        for module in self._model.modules():
            del module._forward_pre_hooks[self._hook_key], module._forward_hooks[self._hook_key]
        if self._optimizer is not None:
            del self._optimizer.step
        self._produced.clear()

    def _border(self, owner: str, phase: str) -> int:
        self._backend.synchronize()
        now = time.time_ns()
        self._borders.append(Border(now, owner, phase))
        return now

    def _around(self) -> str:
        return self._open[-1][0] if self._open else OUTSIDE

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Inputs that no module has produced come from the code of the one around this.
        self._note(args, self._around())
        self._open.append((name, len(self._forwards)))
        now = self._border(name, FORWARD)
        self._forwards.append(Span(name, now, now))

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _, place = self._open.pop()
        now = self._border(self._around(), FORWARD)
        self._forwards[place] = self._forwards[place]._replace(stop=now)
        self._note(output if isinstance(output, tuple | list) else (output,), name)

    def _note(self, tensors: Iterable[Any], owner: str) -> None:
        """When the gradient of a tensor is there, the backward pass of what produced it begins."""
        for tensor in tensors:
            if not isinstance(tensor, flow.Tensor) or tensor.is_leaf or not tensor.requires_grad:
                continue
            if id(tensor) not in self._produced:
                self._produced[id(tensor)] = tensor
                tensor.register_hook(functools.partial(self._backward_begins, owner))

    def _backward_begins(self, owner: str, gradient: flow.Tensor) -> None:
        self._border(owner, BACKWARD)

    def by_operator(self) -> dict[str, tuple[int, float]]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for name, start, stop in self.operators:
            sums[name][0] += 1
            sums[name][1] += (stop - start) / 1e9
        return {name: (int(calls), seconds) for name, (calls, seconds) in sums.items()}

    def by_module(self) -> dict[str, dict[str, float]]:
        """Seconds of each module's own operators, without those of the modules in it, by phase."""
        sums: dict[str, dict[str, float]] = defaultdict(lambda: {FORWARD: 0.0, BACKWARD: 0.0})
        moments = [border.time for border in self._borders]
        for _, start, stop in self.operators:
            border = self._borders[max(0, bisect.bisect_right(moments, start) - 1)]
            sums[border.owner][border.phase] += (stop - start) / 1e9
        return dict(sums)

    def operator_table(self, steps: int, most: int = 15) -> str:
        found = self.by_operator()
        rows = [
            (name, f"{calls / steps:g}", *_times(seconds, steps, self.seconds))
            for name, (calls, seconds) in _longest(found, lambda item: item[1], most)
        ]
        busy = sum(seconds for _, seconds in found.values())
        times = _times(self.seconds - busy, steps, self.seconds)
        rest = ("(no operator: Python, data)", "", *times)
        # What OneFlow tells of a device that has its own memory is how long a call took.
        on_host = self._backend.supports("host_memory")
        name = "operator" if on_host else "operator (its launch)"
        return text_table([(name, "calls", "ms", "%"), *rows, rest], "<>>>")

    def module_table(self, steps: int, most: int = 20) -> str:
        found = self.by_module()
        total = sum(sum(phases.values()) for phases in found.values()) or 1.0
        rows = [
            (
                name or "(the model itself)",
                self._kinds.get(name, ""),
                f"{1e3 * phases[FORWARD] / steps:.2f}",
                f"{1e3 * phases[BACKWARD] / steps:.2f}",
                f"{100 * sum(phases.values()) / total:.1f}",
            )
            for name, phases in _longest(found, lambda item: sum(item.values()), most)
        ]
        heads = ("module", "class", "forward ms", "backward ms", "%")
        return text_table([heads, *rows], "<<>>>")

    def write_trace(self, path: Path) -> None:
        """A file for Perfetto (ui.perfetto.dev) or chrome://tracing, in Chrome's trace format."""
        names = {0: "forward", 1: "backward", 2: "operators"}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in names.items()
        ]
        backwards = [
            Span(border.owner, border.time, after.time)
            for border, after in zip(self._borders, self._borders[1:], strict=False)
            if border.phase == BACKWARD
        ]
        for tid, spans in enumerate((self._forwards, backwards, self.operators)):
            for name, start, stop in spans:
                kind = self._kinds.get(name, "") if tid < 2 else "operator"
                times = {"ts": (start - self._began) / 1e3, "dur": (stop - start) / 1e3}
                shown = name or self._kinds[""]
                events.append(
                    {"ph": "X", "pid": 0, "tid": tid, "name": shown, "cat": kind, **times}
                )
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        replace_file(path, text.encode())


class ProfileSteps(Hook):
    """Profiles `steps` steps of a run after the first ones for the operators and as many again for
    the modules, then prints both tables and writes FOLDER/TRACE_NAME."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps = steps
        self._folder = folder
        self._done = -WARM_UP_STEPS
        self._profiler: Profiler | None = None
        self._tables: list[str] = []

    @property
    def all_steps(self) -> int:
        return self.all_steps_of(self.steps)

    @staticmethod
    def all_steps_of(steps: int) -> int:
        """How many steps a run must have for a profile of `steps` to be whole."""
        return WARM_UP_STEPS + 2 * steps

    def on_step_start(self, trainer: Run) -> None:
        # On every process: a module that is cut over them meets the others in what is timed.
        if self._done in (0, self.steps):
            step = trainer.train_step
            told = self._done > 0
            self._profiler = Profiler(step.model, trainer.backend, step.optimizer, modules=told)
            self._profiler.__enter__()

    def on_step_end(self, trainer: Run) -> None:
        self._done += 1
        if self._profiler is None or self._done not in (self.steps, 2 * self.steps):
            return
        profiler, self._profiler = self._profiler, None
        profiler.__exit__()
        if not distributed.is_main():
            return
        if self._done == self.steps:
            took = 1e3 * profiler.seconds / self.steps
            logger.info("a step takes %.2f ms: mean of %d", took, self.steps)
            logger.info("\n%s\n", profiler.operator_table(self.steps))
            return
        logger.info("%s\n", profiler.module_table(self.steps))
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.write_trace(self._folder / TRACE_NAME)
        logger.info("trace, for ui.perfetto.dev: %s", self._folder / TRACE_NAME)


def _longest(found: dict[str, Any], seconds: Any, most: int) -> list[tuple[str, Any]]:
    return sorted(found.items(), key=lambda item: -seconds(item[1]))[:most]


def _times(seconds: float, steps: int, total: float) -> tuple[str, str]:
    return f"{1e3 * seconds / steps:.2f}", f"{100 * seconds / total:.1f}"


@functools.cache
def _library() -> ctypes.CDLL:
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split()[-1] for line in lines if "/liboneflow-" in line}
    try:
        library = ctypes.CDLL(files.pop())
        ctypes.c_void_p.in_dll(library, _MANAGER), getattr(library, _EXPORT)
    except (KeyError, OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"this build of oneflow cannot be profiled as 0.9.0 can: {error}"
        ) from error
    return library


def _events(library: ctypes.CDLL) -> list[Span]:
    manager = ctypes.c_void_p.in_dll(library, _MANAGER)
    # A vector of shared pointers: its begin, end and capacity.
    vector = (ctypes.c_uint64 * 3)()
    getattr(library, _EXPORT)(ctypes.byref(vector), manager)
    count = (vector[1] - vector[0]) // 16
    pointers = (ctypes.c_uint64 * (2 * count)).from_address(vector[0]) if count else ()
    spans = []
    for event in pointers[::2]:
        # After the table of functions: the name, as strings were before C++11; the unit, which is
        # ns; the times.
        text = ctypes.c_char_p.from_address(event + 8).value or b""
        start, stop = (ctypes.c_double * 2).from_address(event + 24)
        spans.append(Span(text.decode(), int(start), int(stop)))
    # The next `EnableProfiler` makes another one. This one, with its events, is left where it is.
    manager.value = None
    return spans


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the profiler says of missing CUDA tools goes nowhere."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
