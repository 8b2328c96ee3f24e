"""The files of this repository, for the lints."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def listed_files(root: Path) -> list[str]:
    """Paths of what git tracks or could add and is there, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return sorted(path for path in set(listed) if path and (root / path).is_file())
