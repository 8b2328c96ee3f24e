"""Our kernels and models against PyTorch, timm and transformers, inference against OpenVINO and
ONNX Runtime too, and all against stock OneFlow. Of several peers the fastest counts.

    make bench            measure everything, write benchmarks/results/DATE.csv
    make bench ARGS="--only conv gemm"   measure these again; the others stay as they were
    make llama bench ARGS="--only generation llama.cpp"   time per token, beside llama.cpp too
    make bench-compare    measure again, fail where a ratio fell by more than 10 %

A ratio is our throughput over the peer's: above 1 we are faster.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Mapping, Sequence

import oneflow_accel
from oneflow_accel import machine

from benchmarks import chart, flash, results
from benchmarks.items import (
    COMPILED,
    EAGER,
    LLAMA_CPP,
    ONNX_RUNTIME,
    OPENVINO,
    Item,
    all_items,
    chosen_items,
)
from benchmarks.results import Row
from benchmarks.side_by_side import Side, measure
from flow_train import cli
from flow_train.compare.rows import show
from flow_train.metrics.console import Progress

OURS, STOCK = "ours", "stock OneFlow"
# Another process of ours, for rows that compare two items of ours: in turns, as the machine's speed
# changes from minute to minute.
BASE = "ours, base"
# Where a process's memory happens to lie makes it some percent faster or slower, which does not
# cancel out between two items of ours: their processes start this often, each time for all rounds.
STARTS = 5
# A row that seems to have become slower is measured this many times more before it counts.
MORE_TRIES = 2


class Bench:
    """Measures items and makes rows of them."""

    def __init__(self, peer_python: str, threads: int, rounds: int, stock: bool) -> None:
        env = {"ONEFLOW_ACCEL_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        ours = [sys.executable, "-m", "benchmarks.ours.side"]
        peer = [peer_python, "-m", "benchmarks.peers.side", str(threads)]
        self.ours = Side(OURS, ours, env)
        self.base = Side(BASE, ours, env)
        self.peers = {
            name: Side(name, [*peer, name], env)
            for name in (EAGER, COMPILED, OPENVINO, ONNX_RUNTIME, LLAMA_CPP)
        }
        # As a program has it that does not import oneflow_accel.
        off = {"ONEFLOW_ACCEL_PLUGIN": "off", "ONEFLOW_ACCEL_ALLOCATOR": "glibc"}
        off["ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD"] = "1"
        self.stock = Side(STOCK, ours, {**env, **off}) if stock else None
        self.rounds = rounds
        self.date = datetime.date.today().isoformat()
        name = oneflow_accel.current_backend().properties().name
        self.machine = f"{name}, {threads} threads"
        self.items = {item.name: item for item in all_items()}

    def row(self, item: Item) -> Row:
        """Measure one item."""
        why_not = self._why_not(item)
        runs = {OURS: (self.ours, item)}
        runs.update({name: (self.peers[name], item) for name in item.peers})
        if item.against:
            runs[BASE] = (self.base, self.items[item.against])
        seconds, others = self._measure(runs) if why_not is None else ({}, {})
        notes = [] if why_not is None else [why_not]
        notes += [f"{name}: {text}" for name, text in seconds.items() if isinstance(text, str)]
        ours, ms = _number(seconds.get(OURS)), 1e3 / item.parts
        # The fastest counts.
        peer = min(others, key=lambda name: others[name][0], default="")
        theirs, ratio = others.get(peer, (None, None))
        notes += [f"{name}: {_text(others[name][0], ms)} ms" for name in others if name != peer]
        stock = None
        # Stock OneFlow is up to 600 times slower: once is enough, and a process of its own, as some
        # operators end it.
        if self.stock is not None and item.stock and item.against is None:
            found = measure({STOCK: (self.stock, item)}, rounds=1, target=0.05)[STOCK]
            stock = _number(found)
            notes += [f"{STOCK}: {found}"] if isinstance(found, str) else []
        sides = [self.ours, *(self.peers[name] for name in item.peers)]
        versions = dict.fromkeys(", ".join(side.version for side in sides).split(", "))
        return Row(
            date=self.date,
            machine=self.machine,
            versions=", ".join(version for version in versions if version),
            group=item.group,
            item=item.name,
            ours_ms=_text(ours, ms),
            peer_ms="" if item.against else _text(theirs, ms),
            ratio=_text(ratio),
            bar=_text(item.bar if why_not is None else None),
            against=item.against or "",
            stock_ms=_text(stock, ms),
            stock_ratio=_text(theirs / stock if theirs and stock else None),
            note="; ".join(notes)[:200],
            peer="" if item.against else peer,
        )

    def _why_not(self, item: Item) -> str | None:
        """Why the item is not for this machine."""
        if item.precision == "float32":
            return None
        support = oneflow_accel.current_backend().supports("bfloat16_inference")
        return None if support else str(support.reason)

    def _measure(
        self, runs: Mapping[str, tuple[Side, Item]]
    ) -> tuple[dict[str, float | str], dict[str, tuple[float, float]]]:
        """Seconds per step of each run, or what it said when it ended; and of each but ours its
        seconds and how many times as fast ours is, where both have a figure."""
        parts = []
        for _ in range(STARTS if BASE in runs else 1):
            parts.append(measure(runs, rounds=self.rounds, target=0.15))
            if BASE in runs:
                # What they hold would also be in the way of the next item.
                self.ours.stop()
                self.base.stop()
        found: dict[str, float | str] = {}
        others = {}
        for name in runs:
            said = [part[name] for part in parts]
            words = [value for value in said if isinstance(value, str)]
            found[name] = words[0] if words else statistics.median(map(float, said))
            pairs = [(_number(part[name]), _number(part[OURS])) for part in parts]
            ratios = [other / ours for other, ours in pairs if other and ours]
            if name != OURS and ratios and not words:
                others[name] = statistics.median(said), statistics.median(ratios)
        # A model that another process holds is in the way of the next item's.
        for name in set(runs) & {COMPILED, OPENVINO, ONNX_RUNTIME, LLAMA_CPP}:
            self.peers[name].stop()
        return found, others

    def rows(self, items: Sequence[Item]) -> list[Row]:
        """Measure items, with a progress bar and a line for each that is done: it takes an hour."""
        found = []
        with Progress(len(items), "item") as progress:
            for item in items:
                row = self.row(item)
                found.append(row)
                beside = row.against or f"{row.peer} {row.peer_ms} ms"
                said = f"{row.ours_ms} ms, {beside}, ratio {row.ratio}" if row.ratio else row.note
                progress.print(f"{item.name}: {said}")
                progress.update()
        return found

    def stop(self) -> None:
        for side in (self.ours, self.base, *self.peers.values(), self.stock):
            if side is not None:
                side.stop()


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, float) else None


def _text(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{scale * value:.4g}"


def _print(rows: list[Row]) -> None:
    heads = ["what", "ours ms", "peer ms", "peer", "ratio", "bar", "stock ms", "stock ratio"]
    table = [heads]
    for row in rows:
        ratio = f"[bold red]{row.ratio or 'none'}[/]" if row.below_bar else row.ratio
        name = f"{row.item} / {row.against}" if row.against else row.item
        figures = (row.ours_ms, row.peer_ms, row.peer, ratio, row.bar, row.stock_ms)
        table.append([name, *figures, row.stock_ratio])
    show(results.origin(rows), table, left=("what", "peer"))


def _compare(bench: Bench, items: Sequence[Item]) -> int:
    path = results.last_file()
    if path is None:
        print("benchmarks/results has no file to compare with: run `make bench` first")
        return 2
    reference = results.read(path)
    if reference[0].machine != bench.machine:
        print(f"{path.name} is of another machine, {reference[0].machine}; comparing ratios")
    by_name = {item.name: item for item in items}
    rows = bench.rows(items)
    slower = results.regressions(rows, reference)
    for _ in range(MORE_TRIES):
        again = [by_name[row.item] for row, _ in slower]
        slower = results.regressions(bench.rows(again), reference) if again else []
    _print(rows)
    for row, old in slower:
        print(f"SLOWER: {row.item}: ratio {row.ratio or 'none'}, {path.name} {old.ratio}")
    print(f"{len(slower)} of {len(rows)} rows are more than 10 % below {path.name}")
    return 1 if slower else 0


def _run() -> int:
    groups = list(dict.fromkeys(item.group for item in all_items()))
    parser = cli.Parser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--peer", help="the Python that has PyTorch")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*groups, flash.GROUP],
        help="groups to measure (default: all but llama.cpp); flash-attention needs no peer and "
        "comes alone",
    )
    parser.add_argument("--item", help="only the items whose name contains this")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (default: 5)")
    parser.add_argument("--no-stock", action="store_true", help="leave stock OneFlow out")
    parser.add_argument("--compare", action="store_true", help="with the last file; write none")
    options = parser.parse_args()
    if options.only == [flash.GROUP]:
        flash.run([])
        return 0
    if options.peer is None or flash.GROUP in (options.only or []):
        parser.error("--peer names the Python that has PyTorch; only flash-attention goes without")
    items = chosen_items(options.only, options.item)
    if not items:
        parser.error(f"no item's name contains {options.item!r}")
    threads = machine.cores()
    stock = not (options.no_stock or options.compare)
    bench = Bench(options.peer, threads, options.rounds, stock)
    try:
        if options.compare:
            return _compare(bench, items)
        rows = bench.rows(items)
    finally:
        bench.stop()
    _print(rows)
    below = [row for row in rows if row.below_bar]
    print(f"{len(below)} of {len(rows)} rows are below their bar")
    path, last = results.FOLDER / f"{bench.date}.csv", results.last_file()
    if len(items) < len(chosen_items(None, None)):
        has_stock = any(item.stock and item.against is None for item in items)
        if last is None or (options.no_stock and has_stock):
            print("not everything was measured: nothing is written")
            return 0
    if last is not None:
        # Rows that were not measured again keep their date.
        known = [row for row in results.read(last) if row.item in bench.items]
        rows = results.replaced(known, rows)
    results.write(path, rows)
    chart.draw(rows, results.FOLDER)
    print(f"written to benchmarks/results/{path.name}, drawn in latest.png and models.png")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("benchmarks", _run))
