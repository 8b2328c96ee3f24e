"""The metric log (JSON lines, TensorBoard) and the window that gathers metrics on the device."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel import agree, distributed
from oneflow_accel.errors import UserError

import numpy as np
import oneflow as flow

from flow_train.files import replace_file

logger = logging.getLogger("oneflow_accel")


JSONL_NAME = "metrics.jsonl"


class NonFiniteLossError(UserError):
    """A metric became NaN or infinite, first at `step`."""

    def __init__(self, step: int, name: str, value: float) -> None:
        super().__init__(
            f"{name} is {value} at step {step}, the first step that is not finite; training has "
            "stopped. Try a lower learning rate or a warm-up, and look at the data of that step"
        )
        self.step = step


class JsonLines:
    """A file of one JSON object per line. Each is handed to the system at once, so a killed run
    loses only the one in writing, which is removed at the next start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if path.exists() and (lost := len(path.read_bytes().rpartition(b"\n")[2])):
            logger.warning("%s: removed an unfinished last line of %d bytes", path, lost)
            os.truncate(path, path.stat().st_size - lost)
        self._file = path.open("a", encoding="utf-8")

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def keep(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Let the file have these lines in place of its own."""
        self._file.close()
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def finite_or_none(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in the order of logging; unreadable ones are left out. OSError
    if the file cannot be read."""
    lines = []
    for number, text in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
            int(line["step"]), str(line["split"]), dict(line["values"])
        except (ValueError, KeyError, TypeError):
            logger.warning("%s line %d cannot be read and is left out", path, number)
        else:
            lines.append(line)
    return lines


def metric_series(
    lines: Sequence[Mapping[str, Any]], split: str, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """One metric out of `read_metrics`' lines: steps (int64) and values (float64), in the order of
    logging, without values that were not finite."""
    points = [
        (line["step"], line["values"][name])
        for line in lines
        if line["split"] == split and line["values"].get(name) is not None
    ]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


class Logger:
    """A further place for metrics, on the main process."""

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        """One set of values, by name, after `step` optimizer steps."""

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """What is known before training."""

    def truncate(self, step: int) -> None:
        """Forget what was logged after `step`: the run resumes from there."""

    def close(self) -> None:
        """The run is over."""


class TensorBoardLog(Logger):
    """Event files through the writer of the `tensorboard` package; needs no tensorflow. ImportError
    if the package is not installed."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_pb2 = event_pb2
        self._summary_pb2 = summary_pb2
        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        value = self._summary_pb2.Summary.Value
        scalars = [value(tag=f"{split}/{name}", simple_value=v) for name, v in values.items()]
        self._add(step, summary=self._summary_pb2.Summary(value=scalars))

    def truncate(self, step: int) -> None:
        """A session start makes TensorBoard drop what earlier files hold from that step on."""
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._add(step + 1, session_log=start)

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._event_pb2.Event(wall_time=time.time(), step=step, **content)
        self._writer.add_event(event)
        self._writer.flush()


class StepWindow:
    """Metrics of the steps since the last log line, kept on the device: adding a step waits for
    nothing, `fetch` makes the one device-to-host transfer. `steps` are those added since then or,
    until the next `add`, those that `fetch` returned."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._rows: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: int, **metrics: flow.Tensor | float) -> None:
        """Keep the metrics of one step: single-element tensors, local or global (the global value
        is taken), or numbers; the same names at each step."""
        if not self._rows:
            self.steps = []
        elif metrics.keys() != self._rows[0].keys():
            raise ValueError(f"step {step} has {sorted(metrics)}, not {sorted(self._rows[0])}")
        self.steps.append(step)
        self._rows.append(
            {
                name: _as_local_scalar(value) if isinstance(value, flow.Tensor) else float(value)
                for name, value in metrics.items()
            }
        )

    def fetch(self, *, reduce: bool = False) -> dict[str, list[float]]:
        """Bring the window to the host and start a new one: per name one value for each of `steps`,
        tensors at float32 precision. `reduce` averages the tensors over all processes, so that each
        gets the same values or the same error; all must call it at the same step.
        NonFiniteLossError names the first step with a NaN or infinity."""
        rows, self._rows = self._rows, []
        tensors = [
            value for row in rows for value in row.values() if isinstance(value, flow.Tensor)
        ]
        numbers = iter(_to_host(tensors, reduce) if tensors else [])
        columns: dict[str, list[float]] = {name: [] for name in (rows[0] if rows else ())}
        for step, row in zip(self.steps, rows, strict=False):
            for name, value in row.items():
                number = next(numbers) if isinstance(value, flow.Tensor) else value
                if not math.isfinite(number):
                    raise NonFiniteLossError(step, name, number)
                columns[name].append(number)
        return columns


def _to_host(scalars: list[flow.Tensor], reduce: bool) -> list[float]:
    stacked = flow.stack(scalars)
    if reduce and distributed.world_size() > 1:
        flow.comm.all_reduce(stacked)
        stacked = stacked / distributed.world_size()
    return list(stacked.numpy().tolist())


def _as_local_scalar(tensor: flow.Tensor) -> flow.Tensor:
    """A float32 tensor of shape () on this process, without its autograd history."""
    return agree.whole(tensor, to=None).reshape(()).to(flow.float32)


CSV_NAME = "metrics.csv"


class CsvTable(Logger):
    """One row per log line: step, split, time, and a column per metric, empty where the line does
    not have it. Written from metrics.jsonl after each validation and at the end, so that a resumed
    run's table is right."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if split in ("val", "test"):
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        source = self._run_dir / JSONL_NAME
        lines = read_metrics(source) if source.exists() else []
        names: dict[str, None] = {}
        for line in lines:
            names.update(dict.fromkeys(line["values"]))
        text = io.StringIO()
        table = csv.DictWriter(text, ["step", "split", "time", *names], lineterminator="\n")
        table.writeheader()
        for line in lines:
            heads = {key: line.get(key) for key in ("step", "split", "time")}
            table.writerow(heads | line["values"])
        replace_file(self._run_dir / CSV_NAME, text.getvalue().encode())


class WandbRun(Logger):
    """Sends metrics to a wandb run, offline unless the configuration says `mode: online`. `options`
    are `wandb.init`'s: project, name, id, group, tags, mode, ... ImportError if wandb is not
    installed."""

    def __init__(
        self, run_dir: Path, run_name: str, config: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        import wandb

        given = {key: value for key, value in options.items() if value is not None}
        given.pop("_target_", None)
        settings = {"mode": "offline", "name": run_name, "resume": "allow", **given}
        self._run = None
        # Metrics are in metrics.jsonl anyway, so no error of wandb (no network, no account, no
        # disk) may end the run.
        try:
            self._run = wandb.init(dir=str(run_dir), config=dict(config), **settings)
        except Exception as error:
            logger.warning("wandb cannot be used (%s); metrics are in %s", error, run_dir)

    def log(self, step: int, values: Mapping[str, float], split: str) -> None:
        if self._run is not None:
            named = {f"{split}/{name}": value for name, value in values.items()}
            self._guarded(self._run.log, {**named, "step": step}, step=step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._guarded(self._run.config.update, dict(values), allow_val_change=True)

    def close(self) -> None:
        if self._run is not None:
            self._guarded(self._run.finish)

    def _guarded(self, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            logger.warning("wandb has failed (%s) and is left out from here on", error)
            self._run = None


# tensorboard is always on; its key may be there.
_KINDS = ("csv", "tensorboard", "wandb")


def require_loggers(options: Mapping[str, Any]) -> None:
    """Check that each logger of the configuration's group `logger` (options by key, null for off)
    can log. UserError for an unknown key, or a package that is not installed."""
    for key in options:
        if key not in _KINDS:
            raise UserError(f"there is no logger.{key}; there are {', '.join(_KINDS)}")
    if options.get("wandb") is not None and not _is_installed("wandb"):
        raise UserError(
            "logger.wandb: the package wandb is not installed; pip install wandb, or leave "
            "logger=wandb out: metrics.jsonl is written in any case"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # A module that was put into sys.modules by hand has no spec.
        return sys.modules.get(package) is not None


class RunLog:
    """All metrics of a run: OUTPUT_DIR/metrics.jsonl, OUTPUT_DIR/tensorboard if that is installed,
    and further loggers. `options` are the configuration's group `logger`, `more` make others;
    `enabled` is False on all processes but the main one, and in trial runs: nothing is written
    then. Errors are those of `require_loggers`.

    Each line of the file is one object, {"step", "split", "time", "values"}: `time` in seconds
    since 1970 and `values` by name, where a value that is not finite is null (JSON has no NaN).
    """

    def __init__(
        self,
        output_dir: Path | str,
        options: Mapping[str, Any] | None = None,
        *,
        run_name: str = "",
        config: Mapping[str, Any] | None = None,
        enabled: bool = True,
        more: Sequence[Callable[[], Logger]] = (),
    ) -> None:
        options, folder = options or {}, Path(output_dir)
        require_loggers(options)
        self.path = folder / JSONL_NAME
        self._file: JsonLines | None = None
        self._others: list[Logger] = []
        # Evaluations from before the run was resumed, at the step where it goes on.
        self._earlier: set[tuple[int, str]] = set()
        if not enabled:
            return
        self._file = JsonLines(self.path)
        try:
            self._others.append(TensorBoardLog(folder / "tensorboard"))
        except ImportError as error:
            logger.info("no TensorBoard log (%s); metrics are in %s", error, self.path)
        if options.get("csv") is not None:
            self._others.append(CsvTable(folder))
        if options.get("wandb") is not None:
            self._others.append(WandbRun(folder, run_name, config or {}, options["wandb"]))
        self._others += [make() for make in more]

    def log(
        self, step: int, values: Mapping[str, float | Sequence[float]], *, split: str = "train"
    ) -> None:
        """Write values by name, such as {"loss": 2.3, "acc1": 41.0}, after so many optimizer steps;
        `split` is "train", "val", "test" or another heading. Sequences of numbers, such as the loss
        of each step, go to the file only."""
        if self._file is None:
            return
        if (step, split) in self._earlier:
            # Evaluated once more: it was killed before a checkpoint said that this was done.
            self._earlier.remove((step, split))
            lines = read_metrics(self.path)
            self._file.keep([x for x in lines if (x["step"], x["split"]) != (step, split)])
        series = {name: list(v) for name, v in values.items() if isinstance(v, Sequence)}
        numbers = {name: float(v) for name, v in values.items() if not isinstance(v, Sequence)}
        line = {
            "step": step,
            "split": split,
            "time": round(time.time(), 3),
            "values": {
                **{name: finite_or_none(number) for name, number in numbers.items()},
                **{name: [finite_or_none(n) for n in many] for name, many in series.items()},
            },
        }
        self._file.add(line)
        for other in self._others:
            other.log(step, numbers, split)

    def hyperparameters(self, values: Mapping[str, float]) -> None:
        """What is known before training, such as the number of parameters."""
        for other in self._others:
            other.hyperparameters(values)

    def has(self, step: int, split: str) -> bool:
        """Whether something was logged under a heading at a step; the same on every process."""
        lines = [] if self._file is None else read_metrics(self.path)
        found = any(line["split"] == split and line["step"] == step for line in lines)
        return agree.on_rank_0(lambda: found)

    def truncate(self, step: int) -> None:
        """Forget what was logged after `step`: the run resumes from there."""
        if self._file is None:
            return
        lines = [line for line in read_metrics(self.path) if line["step"] <= step]
        self._file.keep(lines)
        self._earlier = {
            (step, line["split"])
            for line in lines
            if line["step"] == step and line["split"] != "train"
        }
        for other in self._others:
            other.truncate(step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for other in self._others:
            other.close()
        self._others = []
