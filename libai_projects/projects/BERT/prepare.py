"""Makes a dataset and a vocabulary for BERT from text; see `libai_projects.text.prepare`."""

from __future__ import annotations

import sys
from pathlib import Path

# Started as a file, only this folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

try:
    from libai_projects.text.prepare import main
except ImportError as error:
    sys.exit(
        f"{error}. prepare.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )

if __name__ == "__main__":
    # [SEP], which ends a text, is put there where samples are made.
    sys.exit(main(["--no-append-eod", *sys.argv[1:]]))
