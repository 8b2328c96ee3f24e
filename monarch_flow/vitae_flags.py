"""What stands here for the options of ViTAE's own programs, for those who type them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent / "docs" / "vitae_options.md"


def counterpart(flag: str, program: str) -> str | None:
    """What to say to somebody who typed an option of ViTAE's, from the tables in DOCUMENT.

    Args:
        flag: such as "--eval_checkpoint" or "-b".
        program: "main.py" or "validate.py": which of them the command here stands for.

    Returns:
        None where it is no option of theirs, or the document is not installed.
    """
    other = {"main.py", "validate.py"} - {program}
    for options, here, remarks in _rows():
        names = [code.split()[0] for code in re.findall(r"`([^`]+)`", options)]
        if flag in names and not any(name in options for name in other):
            if here == "none":
                return f"nothing stands for it here{f' ({remarks})' if remarks else ''}"
            return f"here it is {here.replace('`', '')}"
    return None


def _rows() -> Iterator[list[str]]:
    """(options, what is here, remarks) of each row."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.is_file() else []
    for line in lines:
        # A bar inside code is escaped.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`-"):
            yield cells
