"""Two processes measured in turn, and what happens when one of them ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
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


@pytest.fixture
def sides() -> Iterator[Callable[..., dict[str, tuple[Side, Item]]]]:
    """Sides by name as runs of ITEM; they are stopped in the end."""
    made: list[Side] = []

    def runs(**named: Side) -> dict[str, tuple[Side, Item]]:
        made.extend(named.values())
        return {name: (one, ITEM) for name, one in named.items()}

    yield runs
    for one in made:
        one.stop()


def test_medians_are_per_step(sides) -> None:
    two = sides(fast=side("fast", 0.001), slow=side("slow", 0.004))
    assert measure(two, rounds=3, target=0.1) == pytest.approx({"fast": 0.001, "slow": 0.004})
    assert two["fast"][0].version == "fast 1.0"


def test_long_steps_get_fewer_rounds_but_two() -> None:
    class Counting(Side):
        calls = 0

        def seconds(self, item: Item, steps: int) -> float:
            self.calls += 1
            return 10.0 * steps

    slow = Counting("slow", [])
    assert measure({"slow": (slow, ITEM)}, rounds=5, target=0.1, most=5.0) == {"slow": 10.0}
    assert slow.calls == 2 + 2


def test_a_side_that_ends_is_reported_and_starts_again(sides) -> None:
    dying = side("dying", 0.001, 'sys.exit("no kernel for this")')
    runs = sides(dying=dying, well=side("well", 0.001))
    for _ in range(2):
        seconds = measure(runs, rounds=1, target=0.01)
        assert seconds == {"dying": "no kernel for this", "well": pytest.approx(0.001)}


def test_a_side_that_ends_between_rounds_leaves_the_others(tmp_path: Path, sides) -> None:
    # Once to warm up and once to see how long a step takes, then one round.
    file = f"file = open({str(tmp_path / 'count')!r}, 'a+'); file.write('x'); file.seek(0)"
    dying = side("dying", 0.001, f"{file}; len(file.read()) > 3 and sys.exit('killed')")
    seconds = measure(sides(dying=dying, well=side("well", 0.001)), rounds=3, target=0.001)
    assert seconds == {"dying": "killed", "well": pytest.approx(0.001)}


def test_a_side_that_ends_is_tried_alone(tmp_path: Path, sides) -> None:
    # It has no room as long as the other one has not left it.
    room = f"open({str(tmp_path / 'room')!r}, 'a+')"
    body = f"file = {room}; file.seek(0); file.read() or (file.write('x'), sys.exit('killed'))"
    two = sides(large=side("large", 0.002, body), well=side("well", 0.001))
    seconds = measure(two, rounds=1, target=0.01)
    assert two["well"][0]._process is None
    assert seconds == pytest.approx({"large": 0.002, "well": 0.001})


def test_a_side_that_does_not_start_is_an_error() -> None:
    broken = Side("broken", [sys.executable, "-c", "raise SystemExit('no such module')"])
    with pytest.raises((RuntimeError, SideError), match="broken did not start: no such module"):
        broken.seconds(ITEM, 1)


def test_two_items_are_measured_in_turn(tmp_path: Path, sides) -> None:
    log = tmp_path / "log"
    body = f'open({str(log)!r}, "a").write(name + " ")'
    two = sides(**{name: side(name, 0.001, body) for name in ("dense", "Monarch")})
    measure(
        {name: (one, replace(ITEM, name=name)) for name, (one, _) in two.items()},
        rounds=2,
        target=0.001,
    )
    # Twice each to warm up and to see how long a step takes.
    assert log.read_text().split() == [*["dense"] * 2, *["Monarch"] * 2, *["dense", "Monarch"] * 2]
