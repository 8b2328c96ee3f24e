r"""A text file with one prompt per line, to the dataset that training reads, in one command.

    python projects/MagicPrompt/prepare.py prompts.txt [more] --output-prefix PREFIX

writes PREFIX.bin and PREFIX.idx (see `indexed_dataset`), PREFIX.json, which says what the ids are
(see `token_files`), and PREFIX_valid.* with --validation.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from oneflow_accel.errors import DataError, UserError

from flow_train.cli import Parser
from flow_train.config.flags import flag
from flow_train.config.keys import Positive
from libai_projects.text.corpus import (
    BlockEncoder,
    CorpusReport,
    ReadOptions,
    check_files,
    is_jsonl,
    read_blocks,
    run_command,
    write_corpus,
)
from libai_projects.text.indexed_dataset import DatasetWriter, data_file, dtype_for_vocabulary
from libai_projects.text.token_files import HELD_OUT_SUFFIX, Description
from libai_projects.text.tokenizer import (
    GPT2Tokenizer,
    Tokenizer,
    open_tokenizer,
    train_word_pieces,
)

# Names of the outputs, and of the datasets after the prefix.
_TRAIN, _VALID = "train", "valid"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Options(ReadOptions):
    """The command line."""

    inputs: list[Path] = flag(
        ..., "FILE", names="inputs", how={"nargs": "+"}, group=("text, and the dataset made of it",)
    )
    'text, one prompt per line; or .jsonl, {"text": "..."} per line; gzip or not'
    output_prefix: str = flag(
        os.environ.get("MAGICPROMPT_DATA", "./magicprompt/train/en_train_mmap_text_document"),
        "PREFIX",
        "write PREFIX.bin and PREFIX.idx; $MAGICPROMPT_DATA without it",
    )
    overwrite: bool = flag(False, text="replace a dataset that is there")
    vocab_file: str = flag(os.environ.get("MAGICPROMPT_VOCAB", "./magicprompt/vocab.json"), "FILE")
    "GPT-2's vocab.json; $MAGICPROMPT_VOCAB without it"
    merges_file: str = flag(
        os.environ.get("MAGICPROMPT_MERGES", "./magicprompt/merges.txt"), "FILE"
    )
    "GPT-2's merges.txt; $MAGICPROMPT_MERGES without it"
    tokenizer: str | None = flag(None, "PATH")
    "in place of these two: a tokenizer.json, a tokenizer.model, or the folder of one"
    train_vocabulary: Positive | None = flag(None, "N")
    """first make the tokenizer.json that --tokenizer names: at most N word pieces of the inputs, in
    lower case, as BERT's"""
    split_sentences: bool = flag(False)
    "cut each text after . ! or ? and white space, as BERT needs it for the order of sentences"
    append_eod: bool = flag(True)
    "end each prompt with <|endoftext|>; without it, prompts run into each other"
    validation: str | None = flag(None, "FILE|SHARE")
    """also write PREFIX_valid, which training validates on: from this file, or from a share such as
    0.05 of the prompts"""
    seed: int = flag(1234, "N", "which share --validation takes")
    format: Literal["auto", "text", "jsonl"] = flag("auto", None, "of all inputs")
    json_key: str = flag("text", "KEY", "key of the text")
    report: Path | None = flag(None, "FILE", "also write the counts here, as JSON")


def run(argv: Sequence[str]) -> int:
    """Do what the command line says; 0 on success."""
    parser = Parser(
        prog="prepare.py",
        description="Make a training dataset from text: one prompt per line, UTF-8.",
    )
    Options.add_to(parser)
    arguments = Options.parse(parser, argv)
    share, validation_file = _validation(arguments.validation)
    check_files([*arguments.inputs, *([validation_file] if validation_file else [])])
    if arguments.train_vocabulary:
        _train_vocabulary(arguments)
    if arguments.tokenizer:
        tokenizer: Tokenizer = open_tokenizer(arguments.tokenizer)
    else:
        tokenizer = GPT2Tokenizer(arguments.vocab_file, arguments.merges_file)
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    jsonl = {"auto": None, "text": False, "jsonl": True}[arguments.format]

    def encoder(name: str, held_out: float) -> BlockEncoder:
        return BlockEncoder(
            tokenizer.encode_batch,
            dtype,
            keys={arguments.json_key: name},
            eod_id=tokenizer.eod_token_id if arguments.append_eod else None,
            strip=arguments.strip,
            split_sentences=_SENTENCE_END.split if arguments.split_sentences else None,
            held_out=held_out,
            held_out_name=_VALID,
            seed=arguments.seed,
        )

    jobs = [(arguments.inputs, encoder(_TRAIN, share))]
    if validation_file:
        jobs.append(([validation_file], encoder(_VALID, 0)))
    started = time.monotonic()
    places = {_TRAIN: arguments.output_prefix}
    if arguments.validation:
        places[_VALID] = f"{arguments.output_prefix}{HELD_OUT_SUFFIX}"
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(DatasetWriter(place, dtype, arguments.overwrite))
            for name, place in places.items()
        }
        reports = [
            write_corpus(paths, encode, writers, arguments, jsonl=jsonl) for paths, encode in jobs
        ]
        for name, writer in writers.items():
            if not writer.sequences:
                raise DataError(
                    f"--validation {arguments.validation}: of {reports[0].documents} prompts none "
                    f"is left for {places[name]}; use another share, or a file"
                )
        # Rename only when all datasets are complete.
        for writer in writers.values():
            writer.commit()
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        for name, place in places.items():
            counts = [report.outputs[name] for report in reports if name in report.outputs]
            Description(
                # Ids are never negative, so that signed ones are these, too.
                "uint16" if dtype.itemsize == 2 else "uint32",
                sum(each.tokens for each in counts),
                sum(each.documents for each in counts),
                tokenizer.vocab_size,
                str(arguments.tokenizer or arguments.vocab_file),
                tokenizer.eod_token_id if arguments.append_eod else None,
                pad if pad != eos else None,
            ).write(data_file(place))
    seconds = time.monotonic() - started
    for report in reports:
        print(report.text(places))
    size, padded = tokenizer.vocab_size, tokenizer.padded_vocab_size(8)
    print(
        f"ids of {8 * dtype.itemsize} bits: {size:,} tokens, which a Llama pads to {padded:,}; "
        f"documents end with {tokenizer.eod_token_id}, padding is {tokenizer.pad_token_id}"
    )
    lines, tokens = sum(r.lines for r in reports), sum(r.tokens for r in reports)
    print(f"{seconds:.1f} s: {lines / seconds:,.0f} lines/s, {tokens / seconds:,.0f} tokens/s")
    if arguments.report:
        _write_report(arguments.report, reports)
    return 0


def _train_vocabulary(arguments: Options) -> None:
    """Of all lines of the inputs; the encoder says which of them are bad."""
    place = Path(arguments.tokenizer or "")
    if place.suffix != ".json":
        raise UserError("--train-vocabulary writes what --tokenizer names: FOLDER/tokenizer.json")
    if place.exists() and not arguments.overwrite:
        raise DataError(f"{place} exists already; --overwrite replaces it")
    if arguments.format == "jsonl" or any(map(is_jsonl, arguments.inputs)):
        raise UserError("--train-vocabulary reads plain text, one per line, and not JSON")
    texts = (block.data.decode("utf-8", "replace") for block in read_blocks(arguments.inputs))
    train_word_pieces(texts, arguments.train_vocabulary, place)


def _validation(option: str | None) -> tuple[float, Path | None]:
    """The share to hold out and the file to read, of the value of --validation."""
    if option is None:
        return 0.0, None
    try:
        share = float(option)
    except ValueError:
        return 0.0, Path(option)
    if not 0 < share < 1:
        raise UserError(f"--validation {option}: a share is between 0 and 1, without both ends")
    return share, None


def _write_report(path: Path, reports: list[CorpusReport]) -> None:
    try:
        text = json.dumps([report.to_json() for report in reports], indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the datasets are made, but --report {path} cannot be written: {error.strerror}"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("prepare.py", run, argv)
