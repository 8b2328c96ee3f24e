"""Makes LiBai's datasets from JSON lines; see `libai_projects.text.preprocess`."""

from __future__ import annotations

import sys
from pathlib import Path

# Started as a file, only this folder is on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    from libai_projects.text.preprocess import main
except ImportError as error:
    sys.exit(
        f"{error}. preprocess_data.py runs in the project's environment: type `make setup` in the "
        "repository, then `source .venv/bin/activate`."
    )

if __name__ == "__main__":
    sys.exit(main())
