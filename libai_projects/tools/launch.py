"""The launcher of tools/train.sh and tools/infer.sh: oneflow_accel.launch."""

from __future__ import annotations

import sys
from pathlib import Path

# train.sh and infer.sh start this file from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from oneflow_accel.launch import main

if __name__ == "__main__":
    sys.exit(main())
