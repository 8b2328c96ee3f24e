"""What a run writes while it trains: console, metrics.jsonl, other loggers, a picture,
metrics.json."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

from oneflow_accel.errors import UserError

from libai.utils.events import EventStorage, EventWriter, get_event_storage
from omegaconf import DictConfig, OmegaConf

from flow_train.files import replace_file
from flow_train.metrics.console import format_eta
from flow_train.metrics.curves import draw_curves
from flow_train.metrics.log import JSONL_NAME, RunLog
from libai_projects.engine.check_files import CONFIG_BACKUP, read_backup
from libai_projects.engine.throughput import Throughput

METRICS_NAME = "metrics.json"
CURVES_NAME = "curves.png"
# Seconds from one picture of the curves to the next.
_DRAWING_PERIOD = 60.0
# These are means over the iterations since the last line; other values are the latest.
_AVERAGED = ("total_loss", "time", "data_time")
# LiBai's names of values and splits, and the names in metrics.jsonl.
_NAMES = {"total_loss": "loss", "time": "step_seconds", "data_time": "data_seconds"}
_RESULTS = {"lm_loss": "loss", "lm_loss_PPL": "perplexity", "lm_loss_tokens": "tokens"}
_SPLITS = {"validation": "val"}
# What the console shows of a line, in its order.
_SHOWN = {
    "loss": "total_loss: {:.4g}",
    "lr": "lr: {:.3g}",
    "grad_norm": "grad_norm: {:.3g}",
    "step_seconds": "time: {:.4f} s",
    "data_seconds": "data_time: {:.4f} s",
    "samples_per_second": "{:.4g} samples/s",
    "tokens_per_second": "{:.5g} tokens/s",
    "mfu": "mfu: {:.1f} %",
    "peak_memory_gb": "peak memory: {:.2f} GB",
}

logger = logging.getLogger("libai_projects")


class MetricsWriter(EventWriter):
    """Writes the values of the event storage that it has not seen; the main process has one.

    metrics.jsonl has the form of all runs here (`flow_train.metrics.log`). metrics.json is LiBai's:
    one object per line, `iteration` counting finished iterations; unlike LiBai's it has the last
    evaluation of a run, and means in place of medians over 20. What an earlier part of the run
    wrote after `start_iteration` is removed, since the run did not save those steps.
    """

    def __init__(
        self, cfg: DictConfig, start_iteration: int, max_iter: int, throughput: Throughput
    ) -> None:
        self._output = Path(cfg.train.output_dir)
        self._max_iter, self._throughput = max_iter, throughput
        self._seen: dict[str, int] = {}
        self._is_timed = False
        self._drawn = time.monotonic()
        self._log = RunLog(
            self._output,
            OmegaConf.to_container(cfg.train.get("logger") or OmegaConf.create({})),
            run_name=self._output.name,
            config=read_backup(self._output / CONFIG_BACKUP),
            enabled=True,
        )
        self._log.truncate(start_iteration or -1)
        path = self._output / METRICS_NAME
        if path.exists():
            replace_file(path, "".join(_kept(path, start_iteration)).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self) -> None:
        storage = get_event_storage()
        for iteration, values in self._new(storage).items():
            # JSON has no NaN.
            finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
            line = {"iteration": iteration, **finite}
            self._file.write(json.dumps(line, sort_keys=True) + "\n")
            self._file.flush()
            if "total_loss" in values:
                self._write_step(iteration, values, storage)
            results = {name: value for name, value in values.items() if "/" in name}
            self._write_results(iteration, results)

    def _new(self, storage: EventStorage) -> dict[int, dict[str, float]]:
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

    def _write_results(self, iteration: int, results: dict[str, float]) -> None:
        if not results:
            return
        found = "  ".join(f"{name}: {value:.6g}" for name, value in results.items())
        logger.info("evaluation after %d iterations: %s", iteration, found)
        by_split: dict[str, dict[str, float]] = {}
        for name, value in results.items():
            split, _, result = name.partition("/")
            split, result = _SPLITS.get(split, split), _RESULTS.get(result, result)
            by_split.setdefault(split, {})[result] = value
        for split, values in by_split.items():
            self._log.log(iteration, values, split=split)
        # A picture takes a second, and close() draws the last one.
        if time.monotonic() - self._drawn > _DRAWING_PERIOD:
            self._draw()

    def _write_step(self, iteration: int, values: dict[str, float], storage: EventStorage) -> None:
        own = {_NAMES.get(name, name): v for name, v in values.items() if "/" not in name}
        own["perplexity"] = math.exp(min(values["total_loss"], 50.0))
        # The first iterations are not timed.
        if values.get("time", 0.0) > 0:
            own |= self._rates(values["time"])
        memory = self._throughput.backend.max_memory_allocated()
        if memory is not None:
            own["peak_memory_gb"] = memory / 1e9
        self._log.log(iteration, own)
        parts = [f"iteration: {iteration}/{self._max_iter}", f"consumed samples: {storage.samples}"]
        parts += [form.format(own[name]) for name, form in _SHOWN.items() if name in own]
        if values.get("time", 0.0) > 0:
            left = storage.history("time").median(200) * (self._max_iter - iteration)
            parts.append(f"eta: {format_eta(left)}")
        logger.info("  ".join(parts))

    def _rates(self, seconds: float) -> dict[str, float]:
        """Of iterations of so many seconds; the first time a line says what the MFU is a share
        of."""
        is_new = not self._is_timed
        self._is_timed = True
        rates = self._throughput.values(seconds)
        if is_new and self._throughput.utilization is not None:
            logger.info("%s", self._throughput.utilization)
        return rates

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        try:
            draw_curves(self._output / JSONL_NAME, self._output / CURVES_NAME)
        except (UserError, OSError) as error:
            # A picture that fails must not end the run.
            logger.warning("no picture of the curves: %s", error)

    def close(self) -> None:
        self._draw()
        self._file.close()
        self._log.close()


def _kept(path: Path, last_iteration: int) -> list[str]:
    """The lines of a metrics.json up to an iteration; one that a kill cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            iteration = int(json.loads(text)["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
        if iteration <= last_iteration:
            lines.append(f"{text}\n")
    return lines
