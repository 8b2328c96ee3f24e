"""The loop that both sides of a comparison run: build an item, run steps of it on request.

Pure Python: both sides import it. Reads `NAME<TAB>STEPS` from each line of stdin and answers with
the seconds that the steps took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.items import all_items

Step = Callable[[], None]
Maker = Callable[..., Step]


def serve(
    makers: Mapping[str, Maker], version: str, synchronize: Callable[[], Any] = lambda: None
) -> None:
    """Answer until stdin ends, with steps that `makers` build by an item's kind from its params;
    `synchronize` waits until everything has run."""
    # It imports what is above.
    from benchmarks import both

    items = {item.name: item for item in all_items()}
    print(f"ready {version}", flush=True)
    current, step = "", None
    for line in sys.stdin:
        name, _, steps = line.rstrip("\n").partition("\t")
        if name != current or step is None:
            step = None  # Its memory goes before the next one's comes.
            both.Both.current = items[name]
            step = makers[items[name].kind](**items[name].params)
            current = name
        start = time.perf_counter()
        for _ in range(int(steps)):
            step()
        synchronize()
        print(time.perf_counter() - start, flush=True)
