"""Makes one file of a checkpoint's shards, and shards of such a file.

    python -m vit_10b.consolidate --ckpt_prefix DIR/checkpoints/step-00001251
    python -m vit_10b.consolidate --split FILE.safetensors --processes 8 --save_path DIR

One tensor after the other is read and written. The file holds the model, under the names that it
has in one process; the optimizer's state is left out. Shards of several hosts must be in one
folder, with one host's state.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oneflow_accel.errors import CheckpointError, UserError

from flow_train import cli
from flow_train.checkpoint.folders import (
    Checkpoint,
    CheckpointManager,
    checkpoint_folder,
    read_checkpoint,
)
from flow_train.checkpoint.shards import FileArrays, ShardedArrays, write_safetensors
from flow_train.files import TEMPORARY
from flow_train.metrics.console import Progress

# Of a run that has not begun.
BEGINNING: dict[str, Any] = {"step": 0, "epoch": 0, "batch": 0, "accumulate": 1}
BEGINNING |= {"global_batch_size": 1, "rng": [], "train_step": {}, "callbacks": {}}


def build_parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m vit_10b.consolidate", description=__doc__)
    text = "folder of a checkpoint in shards, or what its shards' paths begin with"
    parser.add_argument("--ckpt_prefix", type=Path, metavar="PATH", help=text)
    text = "what the shards' names end with"
    parser.add_argument("--ckpt_suffix", default="*.safetensors", metavar="PATTERN", help=text)
    text = "file to write (default: the folder's name with _consolidated.safetensors), or with "
    parser.add_argument("--save_path", type=Path, metavar="PATH", help=text + "--split the folder")
    text = "make shards of this file"
    parser.add_argument("--split", type=Path, metavar="FILE", help=text)
    text = "with --split: number of shards"
    parser.add_argument("--processes", type=cli.at_least(1), metavar="N", help=text)
    return parser


def run(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if (options.ckpt_prefix is None) == (options.split is None):
        raise UserError("give --ckpt_prefix, shards to put together, or --split, a file to cut")
    made = _consolidate(options) if options.split is None else _split(options)
    print(f"written: {made}")
    return 0


def _consolidate(options: argparse.Namespace) -> Path:
    prefix = options.ckpt_prefix
    folder = prefix if prefix.is_dir() else prefix.parent
    start = "" if prefix.is_dir() else prefix.name
    if not (folder / "state.json").is_file():
        raise CheckpointError(f"{folder} is not a checkpoint's folder: it has no state.json")
    checkpoint = read_checkpoint(folder)
    arrays, layout = checkpoint.model, checkpoint.layout
    if layout is None or not isinstance(arrays, ShardedArrays):
        raise UserError(f"{folder} holds a model that is not cut: nothing to put together")
    wanted = {layout.file_of(place) for place in range(layout.processes)}
    found = {path.name for path in folder.glob(f"{start}{options.ckpt_suffix}")}
    if found != wanted:
        wrong = ", ".join(sorted(found ^ wanted)[:5])
        raise CheckpointError(
            f"{folder}: the checkpoint has {layout.processes} shards and {len(found)} files fit "
            f"{start}{options.ckpt_suffix}; different are {wrong}"
        )
    target = options.save_path or folder.with_name(f"{folder.name}_consolidated.safetensors")
    shapes = {name: (arrays.dtype(name), arrays.shape(name)) for name in arrays}
    metadata = {"model": checkpoint.name, "state": json.dumps(checkpoint.state)}
    metadata["norm_eps"] = json.dumps(checkpoint.state.get("config", {}).get("norm_eps"))
    with _replacing(target) as temporary, Progress(len(shapes), "tensor") as progress:

        def read(name: str) -> object:
            progress.update()
            return arrays[name]

        write_safetensors(temporary, shapes, read, metadata)
    return target


def _split(options: argparse.Namespace) -> Path:
    if options.processes is None or options.save_path is None:
        raise UserError("--split needs --processes, how many shards, and --save_path, a folder")
    arrays = FileArrays(options.split)
    # A file from elsewhere is of no run: one begins with its weights.
    state = json.loads(arrays.metadata.get("state", "null")) or BEGINNING
    name, step = arrays.metadata.get("model", ""), int(state["step"])
    manager = CheckpointManager(checkpoint_folder(options.save_path))
    try:
        return manager.save_cut(
            Checkpoint(arrays, {}, state, name=name), options.processes, step=step
        )
    finally:
        manager.close()


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """The name under which a file is written before it gets its own."""
    if not target.parent.is_dir():
        raise UserError(f"no folder {target.parent} to write {target.name} into")
    if target.is_dir():
        raise UserError(f"--save_path {target} is a folder: name the file to write")
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    return cli.run("consolidate", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
