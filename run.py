"""What users of HazyResearch/fly type, `python run.py experiment=NAME KEY=VALUE ...`: it is
`python -m monarch_flow.train`, from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    from monarch_flow.train import main

    sys.exit(main())
