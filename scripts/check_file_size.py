"""Lint: no file that git tracks or could add is over 500 kB; exit code 1 if one is."""

from __future__ import annotations

import sys
from pathlib import Path

from tracked import ROOT, listed_files

LIMIT_BYTES = 500_000


def too_large(root: Path) -> list[tuple[str, int]]:
    """(path, bytes) of each file over the limit, largest first."""
    sizes = [(path, (root / path).stat().st_size) for path in listed_files(root)]
    return sorted((item for item in sizes if item[1] > LIMIT_BYTES), key=lambda item: -item[1])


def main(root: Path = ROOT) -> int:
    found = too_large(root)
    for path, size in found:
        print(f"{path}: {size / 1000:.0f} kB is more than {LIMIT_BYTES // 1000} kB")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
