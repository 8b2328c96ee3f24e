"""What users of HazyResearch/fly type before they evaluate a published T2T-ViT.

There it renames weights; here the published names are understood, so it only says how to go on.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def main(paths: Sequence[str]) -> int:
    """Say for each file how it is used; 2 where one is not there, or none is named."""
    if not paths:
        print("usage: convert_checkpoint_t2t_vit.py FILE.pth.tar ...", file=sys.stderr)
        return 2
    for path in paths:
        if not Path(path).is_file():
            print(f"convert_checkpoint_t2t_vit.py: error: no file {path}", file=sys.stderr)
            return 2
        file = shlex.quote(path)
        print(
            f"{path} needs no conversion: evaluate it as it is with eval.ckpt={file}, or write it "
            f"under our names with python -m monarch_flow.convert t2t {file} OUT.safetensors"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
