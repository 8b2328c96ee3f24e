"""What a run writes while it trains: console lines, metrics.json, TensorBoard, a picture."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from oneflow_accel.errors import UserError

from libai.utils.events import EventStorage, EventWriter, get_event_storage

from flow_train.metrics.curves import draw_metrics
from flow_train.metrics.log import TensorBoardLog
from flow_train.metrics.progress import format_eta
from libai_projects.engine.throughput import Throughput

METRICS_NAME = "metrics.json"
CURVES_NAME = "curves.png"
# Averaged over the steps since the last line; of anything else the newest value is written.
_AVERAGED = ("total_loss", "time", "data_time")
# What the split of the data is called whose perplexity is drawn, and the metric.
_DRAWN_SPLIT, _DRAWN_METRIC = "validation", "lm_loss_PPL"

logger = logging.getLogger("libai_projects")


class _NewValues:
    """The values of the event storage that one writer has not seen, with their iteration."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def take(self, storage: EventStorage) -> dict[int, dict[str, float]]:
        """Values by iteration and name."""
        lines: dict[int, dict[str, float]] = {}
        for name, (latest, iteration) in storage.latest().items():
            seen = self._seen.get(name, -1)
            if iteration <= seen:
                continue
            value = latest
            if name in _AVERAGED:
                new = [v for v, at in storage.history(name).values() if at > seen]
                value = sum(new) / len(new)
            lines.setdefault(iteration, {})[name] = float(value)
            self._seen[name] = iteration
        return dict(sorted(lines.items()))


class JSONWriter(EventWriter):
    """Appends one JSON object per line to metrics.json; `iteration` counts finished iterations.

    Unlike LiBai's it writes what the last evaluation of a run finds, and means over the steps
    since the last line in place of medians over 20.

    Args:
        path: of the file.
        start_iteration: what an earlier part of the run wrote after this iteration is removed: the
            run did not save those steps.
    """

    def __init__(self, path: Path, start_iteration: int) -> None:
        self._new = _NewValues()
        if path.exists():
            kept = [
                json.dumps(line, sort_keys=True) + "\n"
                for line in read_metrics(path)
                if line["iteration"] <= start_iteration
            ]
            temporary = path.with_name(f".tmp-{path.name}")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self) -> None:
        for iteration, values in self._new.take(get_event_storage()).items():
            # JSON has no NaN.
            finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
            line = {"iteration": iteration, **finite}
            self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.json; one that a kill cut short is left out.

    Raises:
        OSError: the file cannot be read.
    """
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            int(line["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
        lines.append(line)
    return lines


class TensorBoardWriter(EventWriter):
    """Writes the same values to OUTPUT_DIR/tensorboard.

    Args:
        folder: of the event files.
        start_iteration: TensorBoard drops what earlier files hold from there on.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, start_iteration: int) -> None:
        self._new = _NewValues()
        self._log = TensorBoardLog(folder)
        if start_iteration:
            self._log.forget_after(start_iteration)

    def write(self) -> None:
        for iteration, values in self._new.take(get_event_storage()).items():
            self._log.write(iteration, values)

    def close(self) -> None:
        self._log.close()


class ConsoleWriter(EventWriter):
    """One line per period: progress, loss, speed, memory, remaining time.

    Args:
        max_iter: iterations of the whole run.
        throughput: speed and memory of the run.
    """

    def __init__(self, max_iter: int, throughput: Throughput) -> None:
        self._max_iter = max_iter
        self._throughput = throughput
        self._new = _NewValues()

    def write(self) -> None:
        storage = get_event_storage()
        new = self._new.take(storage).get(storage.iter, {})
        results = {name: value for name, value in new.items() if "/" in name}
        if results:
            found = "  ".join(f"{name}: {value:.6g}" for name, value in results.items())
            logger.info("evaluation after %d iterations: %s", storage.iter, found)
        if "total_loss" not in new:
            return
        left = self._max_iter - storage.iter
        parts = [
            f"iteration: {storage.iter}/{self._max_iter}",
            f"consumed samples: {storage.samples}",
            f"total_loss: {new['total_loss']:.4g}",
        ]
        if "lr" in new:
            parts.append(f"lr: {new['lr']:.3g}")
        # The first iterations are not timed.
        if new.get("time", 0) > 0:
            parts += [
                f"time: {new['time']:.4f} s",
                f"data_time: {new.get('data_time', 0):.4f} s",
                self._throughput.describe(new["time"]),
            ]
        parts.append(self._throughput.describe_memory())
        if new.get("time", 0) > 0:
            seconds = storage.history("time").median(200) * left
            parts.append(f"eta: {format_eta(seconds)}")
        logger.info("  ".join(parts))


class CurveWriter(EventWriter):
    """Draws metrics.json as curves.png when the run ends, and after each evaluation.

    Args:
        metrics: path of metrics.json.
    """

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._drawn_at = -1

    def write(self) -> None:
        evaluated = [at for name, (_, at) in get_event_storage().latest().items() if "/" in name]
        if max(evaluated, default=-1) > self._drawn_at:
            self._drawn_at = max(evaluated)
            self.draw()

    def draw(self) -> None:
        try:
            draw_metrics(
                curve_lines(read_metrics(self._metrics)),
                self._metrics.with_name(CURVES_NAME),
                source=self._metrics,
            )
        except (UserError, OSError) as error:
            # A picture is no reason to lose a run.
            logger.warning("no picture of the curves: %s", error)

    def close(self) -> None:
        self.draw()


def curve_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.json as `draw_metrics` takes them; perplexity is exp(loss)."""
    curves = []
    for line in lines:
        train = {}
        loss = line.get("total_loss")
        if loss is not None:
            train = {"loss": loss, "perplexity": math.exp(min(loss, 50.0))}
        if line.get("lr") is not None:
            train["lr"] = line["lr"]
        perplexity = line.get(f"{_DRAWN_SPLIT}/{_DRAWN_METRIC}")
        val = {}
        if perplexity is not None and perplexity > 0:
            val = {"loss": math.log(perplexity), "perplexity": perplexity}
        for split, values in (("train", train), ("val", val)):
            if values:
                curves.append({"step": line["iteration"], "split": split, "values": values})
    return curves
