r"""JSON lines to LiBai's datasets, with the options of LiBai's `tools/preprocess_data.py`.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-name GPT2Tokenizer \
        --vocab-file vocab.json --merges-file merges.txt --output-prefix PREFIX --append-eod

writes PREFIX_text_document.bin and .idx, for each of --json-keys, or PREFIX_text_sentence with
--split-sentences. The bytes are those of LiBai's tool, but for what is wrong there: --append-eod
crashes, --extra-ids is not passed on, and the GPT-2 tokenizer strips each text (--strip does, too).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from flow_train.cli import Parser, UserError
from flow_train.config.flags import flag
from flow_train.config.keys import Positive
from libai_projects.text.corpus import (
    LINE_BYTES,
    BlockEncoder,
    ReadOptions,
    SplitSentences,
    check_files,
    run_command,
    write_corpus,
)
from libai_projects.text.indexed_dataset import DatasetWriter, dtype_for_vocabulary
from libai_projects.text.tokenizer import GPT2Tokenizer


class Options(ReadOptions):
    """LiBai's options after ours, which have other defaults here."""

    bad_lines: Literal["skip", "error"] = flag(
        "error", group=("not in LiBai's tool but --workers",)
    )
    "lines that are not UTF-8, not JSON, have no such key, ...: count them, or stop"
    max_line_bytes: Positive = flag(16 * LINE_BYTES, "N", "a longer line is bad")
    workers: Positive = flag(1, "N", "processes that encode")

    input: list[Path] = flag(..., "FILE", how={"nargs": "+"}, group=("input data",))
    "a JSON object per line; gzip or not"
    json_keys: list[str] = flag(["text"], "KEY", "keys of the texts", how={"nargs": "+"})
    split_sentences: bool = flag(False)
    """a sequence per sentence (with nltk). LiBai 0.1.1 trains GPT-2 on the first sentence of each
    document only: leave it out for GPT-2"""
    keep_newlines: bool = flag(False)
    "with --split-sentences: keep the white space between sentences"

    tokenizer_name: Literal["BertTokenizer", "GPT2Tokenizer", "T5Tokenizer"] = flag(
        ..., group=("tokenizer",)
    )
    "GPT2Tokenizer is ours, the others are LiBai's"
    vocab_file: str | None = flag(None, "FILE", "its vocabulary")
    merges_file: str | None = flag(None, "FILE", "GPT-2's merges.txt")
    do_lower_case: bool = flag(False, text="for BertTokenizer")
    extra_ids: int | None = flag(None, "N", "sentinel tokens of T5Tokenizer; 100 if not said")
    append_eod: bool = flag(False, text="end each document with the end token")
    do_chinese_wwm: bool = flag(False, text="BertTokenizer: mask whole Chinese words")

    output_prefix: str = flag(..., "PREFIX", group=("output data",))
    "PREFIX_KEY_document.bin, .idx"
    dataset_impl: Literal["mmap"] = flag("mmap")
    "file format; LiBai's older ones, lazy and cached, can be read but are not written any more"
    log_interval: Positive = flag(100, "N")
    "a line of progress after each N documents, though not more than one in 256 KiB"


def run(argv: Sequence[str]) -> int:
    """Do what the command line says; 0 on success."""
    parser = Parser(prog="preprocess_data.py", description="Make LiBai's datasets from JSON lines.")
    Options.add_to(parser)
    arguments = Options.parse(parser, argv)
    if arguments.keep_newlines and not arguments.split_sentences:
        raise UserError("--keep-newlines says how --split-sentences splits; give both")
    check_files(arguments.input)
    tokenizer = _tokenizer(arguments)
    if arguments.tokenizer_name == "BertTokenizer" and not arguments.split_sentences:
        print("BERT wants sentences: did you forget --split-sentences?")
    dtype = dtype_for_vocabulary(len(tokenizer))
    level = "sentence" if arguments.split_sentences else "document"
    places = {key: f"{arguments.output_prefix}_{key}_{level}" for key in arguments.json_keys}
    encoder = BlockEncoder(
        getattr(tokenizer, "encode_batch", lambda texts: [*map(tokenizer.encode, texts)]),
        dtype,
        keys={key: key for key in places},
        eod_id=_eod_id(arguments, tokenizer),
        strip=arguments.strip,
        split_sentences=(
            _splitter(keep_space=arguments.keep_newlines) if arguments.split_sentences else None
        ),
    )
    print(f"vocabulary: {tokenizer.vocab_size} tokens")
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(DatasetWriter(place, dtype, overwrite=True))
            for key, place in places.items()
        }
        report = write_corpus(
            arguments.input,
            encoder,
            writers,
            arguments,
            jsonl=True,
            log_documents=arguments.log_interval,
        )
        # Rename only when all datasets are complete.
        for each in writers.values():
            each.commit()
    print(report.text(places))
    return 0


def _tokenizer(arguments: Options) -> Any:
    files: Mapping[str, str | None] = {"--vocab-file": arguments.vocab_file}
    if arguments.tokenizer_name == "GPT2Tokenizer":
        files = {**files, "--merges-file": arguments.merges_file}
    for option, file in files.items():
        if file is None:
            raise UserError(f"--tokenizer-name {arguments.tokenizer_name} needs {option} FILE")
        if not os.path.isfile(file):
            raise UserError(f"{option} {file} does not exist")
    if arguments.tokenizer_name == "GPT2Tokenizer":
        return GPT2Tokenizer(arguments.vocab_file, arguments.merges_file)
    from libai.tokenizer import build_tokenizer
    from omegaconf import OmegaConf

    settings: dict[str, object] = {
        "name": arguments.tokenizer_name,
        "vocab_file": arguments.vocab_file,
        "do_lower_case": arguments.do_lower_case,
        "do_chinese_wwm": arguments.do_chinese_wwm,
    }
    if arguments.extra_ids is not None:
        settings["extra_ids"] = arguments.extra_ids
    config = {"tokenizer": settings, "append_eod": arguments.append_eod}
    try:
        return build_tokenizer(OmegaConf.create(config))
    except (OSError, ValueError, RuntimeError, UnicodeDecodeError) as error:
        raise UserError(
            f"--vocab-file {arguments.vocab_file} is none for {arguments.tokenizer_name}: {error}"
        ) from error


def _eod_id(arguments: Options, tokenizer: Any) -> int | None:
    if not arguments.append_eod:
        return None
    found = tokenizer.eod_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        raise UserError(f"--append-eod: {arguments.tokenizer_name} has no end token")
    return int(found)


def _splitter(keep_space: bool) -> SplitSentences:
    from nltk.tokenize.punkt import PunktTokenizer  # type: ignore[import-untyped]

    try:
        punkt = PunktTokenizer("english")
    except LookupError as error:
        raise UserError(
            "--split-sentences needs nltk's sentence model: `python -m nltk.downloader punkt_tab` "
            "gets it (into ~/nltk_data; NLTK_DATA names another folder). GPT-2 needs no sentences"
        ) from error

    def split(text: str) -> list[str]:
        spans = list(punkt.span_tokenize(text))
        if not keep_space:
            return [text[begin:end] for begin, end in spans]
        # Each sentence keeps the white space up to the next one.
        begins = [0, *(begin for begin, _ in spans[1:]), len(text)]
        return [text[a:b] for a, b in pairwise(begins)]

    return split


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("preprocess_data.py", run, argv)
