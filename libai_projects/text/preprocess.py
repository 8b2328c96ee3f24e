r"""JSON lines to LiBai's datasets, with the options of LiBai's `tools/preprocess_data.py`.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-name GPT2Tokenizer \
        --vocab-file vocab.json --merges-file merges.txt --output-prefix PREFIX --append-eod

writes PREFIX_text_document.bin and .idx, for each of --json-keys, or PREFIX_text_sentence with
--split-sentences. The bytes are those of LiBai's tool, but for what is wrong there: --append-eod
crashes, --extra-ids is not passed on, and the GPT-2 tokenizer strips each text (--strip does, too).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from flow_train.cli import Parser, UserError, at_least
from libai_projects.text.corpus import (
    BlockEncoder,
    ReadOptions,
    SplitSentences,
    Writer,
    add_reading_options,
    check_files,
    run_command,
    write_corpus,
)
from libai_projects.text.indexed_dataset import (
    CachedDatasetWriter,
    DatasetWriter,
    dtype_for_vocabulary,
)
from libai_projects.text.tokenizer import GPT2Tokenizer


def build_parser() -> Parser:
    """The parser of preprocess_data.py: LiBai's options, then ours."""
    parser = Parser(prog="preprocess_data.py", description="Make LiBai's datasets from JSON lines.")
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="a JSON object per line; gzip or not",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the texts"
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="a sequence per sentence (with nltk). LiBai 0.1.1 trains GPT-2 on the first "
        "sentence of each document only: leave it out for GPT-2",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: keep the white space between sentences",
    )
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-name",
        required=True,
        choices=("BertTokenizer", "GPT2Tokenizer", "T5Tokenizer"),
        help="GPT2Tokenizer is ours, the others are LiBai's",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="its vocabulary")
    group.add_argument("--merges-file", metavar="FILE", help="GPT-2's merges.txt")
    group.add_argument("--do-lower-case", action="store_true", help="for BertTokenizer")
    group.add_argument(
        "--extra-ids", type=int, metavar="N", help="sentinel tokens of T5Tokenizer; 100 if not said"
    )
    group.add_argument(
        "--append-eod", action="store_true", help="end each document with the end token"
    )
    group.add_argument(
        "--do-chinese-wwm", action="store_true", help="BertTokenizer: mask whole Chinese words"
    )
    group = parser.add_argument_group("output data")
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="PREFIX_KEY_document.bin, .idx"
    )
    group.add_argument(
        "--dataset-impl",
        default="mmap",
        choices=("lazy", "cached", "mmap"),
        help="file format; lazy and cached are one older format",
    )
    group = parser.add_argument_group("runtime")
    group.add_argument(
        "--log-interval",
        type=at_least(1),
        default=100,
        metavar="N",
        help="a line of progress after each N documents, though not more than one in 256 KiB",
    )
    group = parser.add_argument_group("not in LiBai's tool, but for --workers")
    add_reading_options(group, bad_lines="error", longest=16, workers=1)
    return parser


def run(argv: Sequence[str]) -> int:
    """Do what the command line says; 0 on success."""
    arguments = build_parser().parse_args(argv)
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
    options = ReadOptions(
        True,
        arguments.bad_lines,
        arguments.max_line_bytes,
        arguments.workers,
        arguments.log_interval,
    )
    print(f"vocabulary: {tokenizer.vocab_size} tokens")
    with ExitStack() as stack:
        writers: dict[str, Writer] = {}
        for key, place in places.items():
            if arguments.dataset_impl == "mmap":
                writers[key] = DatasetWriter(place, dtype, overwrite=True)
            else:
                writers[key] = CachedDatasetWriter(place)
            stack.push(writers[key])
        report = write_corpus(arguments.input, encoder, writers, options)
        # Rename only when all datasets are complete.
        for each in writers.values():
            each.commit()
    print(report.text(places))
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Any:
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


def _eod_id(arguments: argparse.Namespace, tokenizer: Any) -> int | None:
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
