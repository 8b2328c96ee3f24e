"""Converts weights of GPT-2, Llama and BERT between Hugging Face, Meta and LiBai.

    python -m libai_projects.weights.convert SRC DST --from huggingface --to libai

`--help` lists the options.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from oneflow_accel import command
from oneflow_accel.command import Parser
from oneflow_accel.errors import UserError

from flow_train.config.flags import Flags, flag
from flow_train.config.keys import Above0, Positive
from libai_projects.weights import huggingface, loading, old_runs
from libai_projects.weights.folders import check_target, read_json
from libai_projects.weights.gpt2 import GPT2
from libai_projects.weights.libai_checkpoints import save_libai
from libai_projects.weights.llama import LLAMA


class Options(Flags):
    """The command line."""

    source: Path = flag(..., "SRC", "folder to read", names="source")
    target: Path = flag(..., "DST", "folder to write", names="target")
    source_kind: Literal["huggingface", "libai", "upstream", "meta"] = flag(..., names="--from")
    """huggingface: config.json with safetensors or pytorch_model.bin, sharded or not; libai: a
    checkpoint of LiBai 0.1.1 or this project; upstream: of later LiBai, linear weights (out, in),
    and the shapes tell these two apart; meta: params.json with consolidated.*.pth"""
    target_kind: Literal["huggingface", "libai"] = flag(..., names="--to")
    resumable: Literal["eager", "graph"] | None = flag(None)
    """of a run's checkpoint, --from libai --to libai: write optimizer and schedule, too, from which
    LiBai's own trainer goes on in this mode with train.output_dir=DST"""
    dtype: Literal["float32", "float16", "bfloat16", "int8"] = flag(
        "float32", names="--dtype --precision"
    )
    """of what is written; int8: the linear weights of a Hugging Face DST, with a scale for each
    output, from which generation makes the same integers again"""
    max_shard_size: Above0 = flag(5.0, "GB")
    "several files above this, into a Hugging Face DST"
    partial: bool = flag(False, text="go on without weights that are missing or unfit")
    force: bool = flag(False, text="replace DST, if it holds weights")

    model: Literal["gpt2", "llama", "bert"] | None = flag(
        None, group=("what a LiBai checkpoint may not tell",)
    )
    "default: what config.json says, llama for meta, else gpt2"
    heads: Positive | None = flag(None, "N", "attention heads")
    vocab_size: Positive | None = flag(None, "N")
    "tokens; rows above are padding (default: 50257 if padded)"
    activation: Literal["gelu_tanh", "gelu", "relu"] | None = flag(None)
    "of a GPT-2 (default: gelu_tanh)"

    vocab_multiple: Positive = flag(128, "N", group=("output",))
    """pad the vocabulary of a LiBai checkpoint to a multiple of this; 128 is what LiBai makes of it
    on one process, 1 no padding"""
    tokenizer: Path | None = flag(None, "DIR")
    """take vocab.json, merges.txt, tokenizer.json ... from there into a Hugging Face DST (default:
    SRC, if it is one)"""


def parse_arguments(argv: Sequence[str]) -> Options:
    """The command line. UserError: it is wrong."""
    parser = Parser(
        prog="python -m libai_projects.weights.convert",
        description="Convert weights of language models between Hugging Face, Meta and LiBai. "
        "Numbers are computed and written in float32 unless --dtype says otherwise.",
    )
    Options.add_to(parser)
    return Options.parse(parser, argv)


def run(options: Options) -> str:
    """Convert, and say what was done; a UserError where the source or the target is wrong."""
    target, source = options.target.resolve(), options.source.resolve()
    if target == source or target in source.parents:
        raise UserError(f"{options.target} is or contains the source; choose another folder")
    # Check the target before the source takes minutes to read.
    check_target(options.target, force=options.force)
    if options.resumable:
        if (options.source_kind, options.target_kind) != ("libai", "libai"):
            raise UserError("--resumable goes with --from libai --to libai")
        graph = options.resumable == "graph"
        written = old_runs.write(options.source, options.target, graph=graph, force=options.force)
        return f"{written}: with optimizer and schedule"
    table = loading.TABLES[options.model or _model_at(options.source, options.source_kind)]
    overrides = {
        "num_attention_heads": options.heads,
        "vocab_size_real": options.vocab_size,
        "activation": options.activation,
    }
    loaded = loading.read(
        options.source,
        options.source_kind,
        overrides=overrides,
        partial=options.partial,
        table=table,
    )
    if table.tokens not in loaded.state:
        raise UserError(f"{options.source} has no token embedding that fits")
    if options.target_kind == "libai":
        rows = len(loaded.state[table.tokens])
        save_libai(
            loaded.state,
            loaded.config,
            options.target,
            table,
            generation=loaded.generation,
            vocabulary_rows=-(-rows // options.vocab_multiple) * options.vocab_multiple,
            dtype=options.dtype,
            force=options.force,
        )
    else:
        if "num_attention_heads" not in loaded.config:
            raise UserError(
                f"{options.source} does not say how many attention heads the model has (there is "
                "no config.yaml of its run); give --heads"
            )
        folder = options.tokenizer
        if folder is None and options.source_kind == "huggingface":
            folder = options.source
        huggingface.write(
            loaded.state,
            loaded.config,
            options.target,
            table,
            dtype=options.dtype,
            max_shard_bytes=int(options.max_shard_size * 1e9),
            generation=loaded.generation,
            tokenizer_files=_tokenizer_files(folder, required=options.tokenizer is not None),
            force=options.force,
        )
    numbers = sum(array.size for array in loaded.state.values())
    text = f"{options.target}: {len(loaded.state)} weights, {numbers:,} numbers in {options.dtype}"
    return f"{text}\nleft out:\n{loaded.report}" if loaded.report else text


def _model_at(source: Path, kind: str) -> str:
    """The model_type of what is there."""
    settings = source / huggingface.CONFIG
    found = LLAMA.model_type if kind == "meta" else GPT2.model_type
    if kind == "huggingface" and settings.is_file():
        found = read_json(settings).get("model_type", found)
    # The reader says what is wrong with another model.
    return found if found in loading.TABLES else GPT2.model_type


def _tokenizer_files(folder: Path | None, *, required: bool) -> list[Path]:
    if folder is None:
        return []
    files = [folder / name for name in huggingface.TOKENIZER_FILES]
    found = [file for file in files if file.is_file()]
    if required and not found:
        raise UserError(
            f"--tokenizer {folder}: none of {', '.join(huggingface.TOKENIZER_FILES)} is there"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; user errors become text on stderr and a non-zero exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    arguments = sys.argv[1:] if argv is None else argv
    return command.run("convert", lambda: print(run(parse_arguments(arguments))))


if __name__ == "__main__":
    sys.exit(main())
