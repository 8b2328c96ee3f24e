"""Two processes measured in turn, and what happens when one of them ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.items import Item
from benchmarks.side_by_side import Side, SideError, measure

ITEM = Item("an item", "gemm", "linear")
SIDE = """
import sys
print("chatter", flush=True)
print("ready {name} 1.0", flush=True)
for line in sys.stdin:
    name, steps = line.rstrip("\\n").split("\\t")
    {body}
    print({seconds} * int(steps), flush=True)
"""


def side(name: str, seconds: float, body: str = "pass") -> Side:
    code = SIDE.format(name=name, seconds=seconds, body=body)
    return Side(name, [sys.executable, "-c", code])


def test_medians_are_per_step() -> None:
    sides = [side("fast", 0.001), side("slow", 0.004)]
    try:
        seconds = measure({one.name: (one, ITEM) for one in sides}, rounds=3, target=0.1)
    finally:
        for one in sides:
            one.stop()
    assert seconds == pytest.approx({"fast": 0.001, "slow": 0.004})
    assert sides[0].version == "fast 1.0"


def test_long_steps_get_fewer_rounds_but_two() -> None:
    class Counting(Side):
        calls = 0

        def seconds(self, item: Item, steps: int) -> float:
            self.calls += 1
            return 10.0 * steps

    slow = Counting("slow", [])
    assert measure({"slow": (slow, ITEM)}, rounds=5, target=0.1, most=5.0) == {"slow": 10.0}
    assert slow.calls == 2 + 2


def test_a_side_that_ends_is_reported_and_starts_again() -> None:
    dying = side("dying", 0.001, 'sys.exit("no kernel for this")')
    well = side("well", 0.001)
    runs = {"dying": (dying, ITEM), "well": (well, ITEM)}
    try:
        for _ in range(2):
            seconds = measure(runs, rounds=1, target=0.01)
            assert seconds == {"dying": "no kernel for this", "well": pytest.approx(0.001)}
    finally:
        dying.stop()
        well.stop()


def test_a_side_that_ends_between_rounds_leaves_the_others(tmp_path: Path) -> None:
    count = tmp_path / "count"
    # Once to warm up and once to see how long a step takes, then one round.
    lines = [
        f"file = open({str(count)!r}, 'a+')",
        "file.write('x')",
        "file.seek(0)",
        "len(file.read()) > 3 and sys.exit('killed')",
    ]
    body = "; ".join(lines)
    sides = {"dying": side("dying", 0.001, body), "well": side("well", 0.001)}
    try:
        seconds = measure(
            {name: (one, ITEM) for name, one in sides.items()}, rounds=3, target=0.001
        )
    finally:
        for one in sides.values():
            one.stop()
    assert seconds == {"dying": "killed", "well": pytest.approx(0.001)}


def test_a_side_that_ends_is_tried_alone(tmp_path: Path) -> None:
    # It has no room as long as the other one has not left it.
    room = f"open({str(tmp_path / 'room')!r}, 'a+')"
    body = f"file = {room}; file.seek(0); file.read() or (file.write('x'), sys.exit('killed'))"
    sides = {"large": side("large", 0.002, body), "well": side("well", 0.001)}
    try:
        seconds = measure({name: (one, ITEM) for name, one in sides.items()}, rounds=1, target=0.01)
        assert sides["well"]._process is None
    finally:
        for one in sides.values():
            one.stop()
    assert seconds == pytest.approx({"large": 0.002, "well": 0.001})


def test_a_side_that_does_not_start_is_an_error() -> None:
    broken = Side("broken", [sys.executable, "-c", "raise SystemExit('no such module')"])
    with pytest.raises((RuntimeError, SideError), match="broken did not start: no such module"):
        broken.seconds(ITEM, 1)


def test_two_items_are_measured_in_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f'open({str(log)!r}, "a").write(name + " ")'
    sides = {name: side(name, 0.001, body) for name in ("dense", "Monarch")}
    runs = {name: (one, Item(name, "vitae", "vitae_train")) for name, one in sides.items()}
    try:
        measure(runs, rounds=2, target=0.001)
    finally:
        for one in sides.values():
            one.stop()
    # Twice each to warm up and to see how long a step takes.
    assert log.read_text().split() == [*["dense"] * 2, *["Monarch"] * 2, *["dense", "Monarch"] * 2]
