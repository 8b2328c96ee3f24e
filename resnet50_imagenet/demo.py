"""`make demo`: train a small ResNet on real images, from nothing, in some minutes on a CPU.

The images are the 1,797 handwritten digits inside scikit-learn (UCI optical recognition of
handwritten digits, 8 x 8 gray), written out as an ImageFolder, the form ImageNet has.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from oneflow_accel.kernels import plugin

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from flow_train import cli
from resnet50_imagenet import main as imagenet

DEFAULT_FOLDER = Path("runs") / "demo"
IMAGE_SIZE = 32
# Every fifth image of each class is kept for validation.
VAL_EVERY = 5
EPOCHS = 6


def write_digits(root: Path) -> None:
    """Write the digits as gray PNGs, 32 x 32: root/{train,val}/{0..9}/NNNN.png. Does nothing where
    `root` is complete already."""
    if root.is_dir():
        return
    digits = load_digits()
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    seen = np.zeros(10, dtype=int)
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if seen[label] % VAL_EVERY == 0 else "train"
        seen[label] += 1
        folder = partial / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        # 17 gray levels, 0 to 16.
        image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
        image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC).save(
            folder / f"{index:04d}.png"
        )
    partial.rename(root)


def main() -> int:
    return cli.run("demo", _run)


def _run() -> int:
    parser = cli.Parser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where all of it goes")
    folder = parser.parse_args().folder
    started = time.perf_counter()
    data = folder / "digits"
    run = folder / "resnet18"
    write_digits(data)
    # The demo starts from nothing each time, so its old run can go.
    shutil.rmtree(run, ignore_errors=True)
    arguments = [str(data), "-a", "resnet18", "--image-size", str(IMAGE_SIZE)]
    arguments += ["--epochs", str(EPOCHS), "-b", "64", "--lr", "0.02", "-j", "0", "--seed", "0"]
    # A mirrored 2 is not a digit, and most of a digit must be visible.
    arguments += ["--scale", "0.7", "1", "--hflip", "0", "--output-dir", str(run)]
    # Stock OneFlow has no NHWC on a CPU; without the plug-in the demo is slower but works.
    if plugin.state().loaded:
        arguments.append("--channels-last")
    print(f"python3 main.py {' '.join(arguments)}", flush=True)
    code = imagenet.main(arguments)
    if code != 0:
        return code
    print(
        f"""
Trained in {time.perf_counter() - started:.0f} s. Look at
    {run}/curves.png     loss and accuracy
    {run}/checkpoints    continue with --resume auto and more --epochs
Next:
    source .venv/bin/activate
    ImageNet       cd resnet50_imagenet && python3 main.py -a resnet50 --channels-last DIR
    MagicPrompt    libai_projects/projects/MagicPrompt/README.md
    Monarch ViTs   monarch_flow/README.md"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
